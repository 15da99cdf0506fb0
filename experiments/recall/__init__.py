"""Does it use what is far? Associative recall over 16 to 60,000 tokens, under dense, fixed and content-chosen masks, at equal steps
or equal time, beside what ``sf.explain`` says of each mask's reach. A program to copy; it builds on examples/train_lm.

task       sequences of pairs and questions, by seed and number
arms       the masks that are compared, and how far each lets information travel
settings   what a trial is, its presets, its curriculum
model      train_lm's decoder with pairs embedded together, and with blocks chosen by content
train      the loop                    evaluate   right answers by distance and by hops
report     the picture and tables
"""
