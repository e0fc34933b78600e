"""Workers: processes that try batch sizes and may crash, hang or run out of memory.

Read ``supervisor`` (when to reuse, replace or ask a worker again), ``process``, ``child``, then
``step_times``. May import ``probing``'s own files, ``training`` and everything below it.
"""
