"""Frozen records of a search: its probes, its answer, the memory model. Imports no torch.

Read ``record``, ``probe``, ``memory_model``, ``result``, ``accumulation`` in this order. May import
``units`` and ``errors``.
"""
