"""Try one batch size on all ranks of a job. The ranks agree on every outcome.

Read ``job``, ``meeting`` (where ranks exchange data), ``consensus``, ``prober`` (ranks in worker
processes), then ``in_process`` (ranks of a user's script). May import ``probing`` and everything
below it.
"""
