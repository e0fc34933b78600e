"""Try batch sizes in workers: this process, or others that may crash or run out of memory.

Read ``worker`` (the protocol), ``supervisor`` (when to reuse, replace or ask again), ``here``,
``process_worker``, ``host``, ``fork``, then ``child`` and ``serving``. May import ``probing``'s own
files, ``training`` and everything below it.
"""
