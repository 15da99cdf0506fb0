"""Workloads, baselines, measurements and reports. Each imports only those below it:

rows                 sf.bench: figures of a user's masks, as values
run, traffic, busy   the loop over cases; two programs of their own: memory traffic, a busy machine
report               rows, tables, plots and one HTML page, from the JSON alone
measure              throughput, latency, accuracy, drift of baselines, noise
baselines            the peers: their interface, their registry, a module for each that needs more than a few lines
workload             cases, suites, masks, problems
results              the JSON file, resuming, the environment
"""
