"""batchfinder inside the user's own training.

Read ``guard.py`` (steps that survive out-of-memory errors), ``watch.py`` (the memory of each step),
then ``transformers.py`` (the answer set in a Trainer). A file here may import the finder
and everything below it.
"""
