"""Does a video model still make video if its attention is sparse? A small rectified-flow transformer is trained on generated
scenes, dense and sparse, and sampled dense and sparse. Videos are compared with dense attention's and with the truth.

scenes   moving, colliding, occluding shapes             model    the transformer, over tokens in tile order
flow     noise to video, and back                        masks    what its layers attend under
train    one model                                       rows     what is trained and what is compared
measure  one row                                         report   files of rows, and the table
picture  frames of rows, and likeness by share           cli      the commands
"""
