"""A trace: a training step's requests to the allocator, in order, at one or every batch size.

Read ``curve``, ``trace``, ``alignment``, ``repeats``, then ``recorder`` (what kernels write to).
May import ``allocator`` and ``gpus``.
"""
