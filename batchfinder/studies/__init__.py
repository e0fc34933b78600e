"""Many searches, one answer: which lever buys how much, and what fits at which length.

Read ``strategies``, ``checkpointing``, ``applied``, ``comparison``, ``compare``, then
``measuring``. For sweeps, read ``scaling``, ``swept``, ``sweep`` and ``worst_batch``.
"""
