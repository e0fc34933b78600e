"""PyTorch's caching allocator for CUDA, simulated, and recorded steps that are replayed in it.

Read ``blocks``, ``caching``, ``expandable``, ``recorded_step``, then ``recorded``. Imports no
torch; may import ``steadiness``, ``search`` and ``units``.
"""
