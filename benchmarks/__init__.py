"""Workloads, baselines, measurements and reports. Each imports only those below it:

rows                          sf.bench: figures of a user's masks, as values
run                           the loop over cases
traffic, selection, choosers, programs, each a command: memory traffic; key blocks chosen by query; what choosing blocks costs;
video, context, decoding,     steps of video models; one sequence over several GPUs; steps of decoding; attention in e4m3
precision
program                       what the programs share: options, files of rows
report                        rows, tables, plots and one HTML page, from the JSON alone
measure                       throughput, failures that are results, accuracy, drift of baselines, noise, time of calls
baselines                     the peers: their interface, their registry, a module for each that needs more than a few lines
workload                      cases, suites, masks, problems, planted queries and keys
results                       the JSON file, resuming, the environment; the folder beside it holds kept results (CONTRIBUTING.md)
"""
