"""The memory that each operator allocates on CUDA: its outputs, and the workspaces of its kernels.

Read ``outputs`` and ``workspaces``. They call the other files, one for each kind of operator. May
import ``trace``, ``values``, ``allocator``, ``gpus`` and ``units``.
"""
