"""Training steps on stock `torch.compile`: each graph that Dynamo finds is replayed when the step calls it.

Dynamo's guards decide whether a call is one that was traced, and its bytecode makes the step's writes to Python. The
library replaces only the graphs that this bytecode calls. A forward is replayed when the step calls it, its backward
when the loop asks for it, the update when the loop asks for it: code in between sees what it sees in plain training.
"""
