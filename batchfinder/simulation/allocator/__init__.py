"""PyTorch's caching allocator for CUDA, simulated.

Read ``rounding``, ``caching``, then ``expandable``. Imports no torch; may import ``units``.
"""
