"""Try one batch size, and read what the device says about it.

Read ``options``, ``devices/device``, ``session`` (a few steps at one size), ``steadiness``,
``attempt``, then ``workers``, ``ranks`` and ``choose_prober``. May import ``training``, ``search``,
``results``, ``units`` and ``errors``.
"""
