"""Many searches, one answer: which lever buys how much, and what fits at which length.

Read ``strategies``, ``checkpointing``, ``applied``, ``study``, ``comparison``, ``estimating``,
``measuring``, then ``compare``; for sweeps ``scaling``, ``sweeping``, ``swept``, ``over``, then
``sweep``, and ``worst_batch``.
"""
