"""A training step on fake tensors, recorded as a trace of allocations.

Read ``step_trace``, ``fake``, ``tracker``, ``operators``, ``copies`` in this order; each of the
other files covers one feature of PyTorch. May import ``kernels``, ``values``, ``trace``,
``probing``, ``training`` and ``errors``.
"""
