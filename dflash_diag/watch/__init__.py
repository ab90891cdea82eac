"""A folder in which a training leaves checkpoints: a report for each, once, and what became of it.

`finding` says what lies there, `settling` whether somebody still writes to it, `identity` what it
is, `regression` whether it is worse than before; `watching` does it all, one after another.
"""
