"""The command line: one file for each command.

Read ``app`` (the commands and their options; the only place that exits), ``options``, ``find``,
then ``estimating`` and ``studies``. May import everything.
"""
