"""Does a pretrained model keep its loss and its retrieval if it reads only blocks that are chosen from its queries and keys? Both
are measured against density, by chooser and rule, without training.

rows     what is compared                                oracle   a chooser that reads the exact softmax mass
texts    windows of text, and needles in it              model    the model, and what its layers attend under
measure  a row: the rule's number, density, recall, error, loss, retrieval
report   files of results, and what is said of a row     tables   in Markdown
picture  loss and retrieval against density              cli      the commands
"""
