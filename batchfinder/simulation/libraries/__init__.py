"""Code outside of PyTorch's operators that behaves differently on CUDA, replaced in a simulation.

Each file covers one library or feature and has one context manager. May import ``values`` and
``training``.
"""
