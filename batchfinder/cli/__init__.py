"""The command line: a file for each command, but for ``report``, which is in ``output``.

Read ``app`` (the commands and their options), ``exiting`` (how they run and end), ``options``,
``find``, then ``estimating`` and ``studies``. May import everything.
"""
