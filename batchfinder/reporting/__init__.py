"""Results for people: the terminal, tables of estimates, an HTML page.

Read ``wording``, ``table``, ``answer``, ``progress``, then ``columns``, ``estimates``, ``chart``
and ``page``. Knows only the protocol of probers. May import ``search``, ``results``,
the records of ``simulation`` and ``studies``, ``training.user_module``, ``units`` and ``errors``.
"""
