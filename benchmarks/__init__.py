"""What is measured, against whom, and how it is drawn.

cases    what is measured: plain data           suites   which cases each suite has
masks    the masks of their rows                problem  a case's tensors and mask
peers    against whom: peer (what one is), flex, fa4
measure  how it is timed, and its memory        calls    what one call of a short problem costs
check    whether it computed the right thing    results  the JSON file, resuming, environment
run      the loop                               rows, tables, beside, paper, written   tables, from the JSON alone
plots, report   PNG files and one HTML page, from the JSON alone
"""
