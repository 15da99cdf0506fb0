"""What is measured, against whom, and how it is drawn. Each of these imports those after it, never one before:

run, traffic, busy   the loop over cases; two programs of their own: memory traffic, a busy machine
report               rows, tables, plots and one HTML page, from the JSON alone
measure              throughput, latency, accuracy, drift of baselines, noise
baselines            the peers: what one is, their registry, a module for each that needs more than a few lines
workload             cases, suites, masks, problems
results              the JSON file, resuming, the environment
"""
