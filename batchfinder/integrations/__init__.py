"""batchfinder inside the user's own training.

Read ``oom_guard.py`` (steps that survive out-of-memory errors), ``watch.py`` (the memory of each
step), ``transformers.py`` (the answer set in a Trainer), ``accelerate.py`` (a training function run
again with another size), then ``lightning.py`` (a callback), with ``lightning_step.py`` and
``lightning_data.py``. A file here may import the finder and everything below it.
"""
