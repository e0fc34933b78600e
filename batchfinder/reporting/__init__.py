"""Results for people: the terminal, tables of estimates, an HTML page. Knows no prober.

Read ``wording``, ``table``, ``answer``, ``terminal``, then ``estimates``, ``chart`` and ``page``.
May import ``results``, ``simulation``'s records, ``units`` and ``errors``.
"""
