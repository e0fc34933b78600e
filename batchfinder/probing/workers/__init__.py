"""Try batch sizes in workers: this process, or others that may crash or run out of memory.

A size goes down one of these ways, ``=>`` is a pipe, and an ``Attempt`` comes back::

    this process  Supervisor -> Here -> ProbeSession
    a fork of it  Supervisor -> ProcessWorker -> WorkerProcess => serve -> Here -> ...
    a new one     Supervisor -> ProcessWorker -> WorkerProcess => fork_server => serve -> ...
    all ranks     RankProber, a Supervisor on each rank -> as a new one

Read ``worker`` (the protocol), ``supervisor`` (when to reuse, replace or ask again), ``here``,
``process_worker``, ``hung`` (when a step counts as hung), ``fork``, ``fork_server``, then ``child``
and ``serving``. May import ``probing``'s own files, ``training`` and everything below it.
"""
