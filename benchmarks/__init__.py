"""What is measured, against whom, and how it is drawn.

cases     what is measured: plain data          measure   how it is timed, and what its memory is
peers     against whom                          check     whether it computed the right thing
results   the JSON file, resuming, environment  tables    rows with ratios, from the JSON alone
run       the loop                              plots, report   PNG files and one HTML page, from the JSON alone
traffic   a program of its own: bytes of DRAM that the forward pass reads, against density
"""
