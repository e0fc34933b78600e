"""A simulated CUDA device: a training step on fake tensors, replayed in a model of the allocator.

Read ``gpus``, ``tracing/step_trace``, ``trace/trace``, ``replay``, ``prober``, ``estimate``,
``explanation`` in this order. ``recordings`` replays real steps instead. May import ``probing``,
``training``, ``search``, ``results``, ``units`` and ``errors``.
"""
