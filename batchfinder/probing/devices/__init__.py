"""Devices: their memory, its limit, its peaks, and which errors mean that it ran out.

Read ``device`` (the protocol), ``cuda``, ``cpu`` with ``process_peak``, ``other``,
``choose_device``, then ``oom_table`` and ``oom``. May import ``steadiness``, ``results``,
``units`` and ``errors``.
"""
