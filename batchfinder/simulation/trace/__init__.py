"""A trace: what a training step asks of the allocator, in order, at one size or at every size.

Read ``curve``, ``trace``, ``alignment``, then ``recorder`` (what kernels write to). May import
``allocator`` and ``gpus``.
"""
