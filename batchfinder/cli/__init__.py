"""The command line: one file for each command.

Read ``app`` (the commands and their options), ``exiting`` (how they run and end), ``options``,
``find``, then ``estimating`` and ``studies``. May import everything.
"""
