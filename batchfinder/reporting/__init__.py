"""Results for people: the terminal, tables of estimates, a plot. Knows no prober.

Read ``wording``, ``table``, ``answer``, ``terminal``, then ``estimates`` and ``plot``. May import
``results``, ``simulation``'s records, ``units`` and ``errors``.
"""
