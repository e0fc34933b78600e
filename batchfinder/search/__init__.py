"""The search: it decides which batch size to try next, and when the answer is proved.

Read ``prober`` (the protocol of what runs the steps), ``bounds``, ``bracket`` (what was seen),
``belief`` (where the answer may be), ``plan`` (what to try next), ``guessing`` (moves to a guess of
the answer), ``search``, ``run`` (one search from its first probe to its result), then
``conclusion`` and ``remarks``. Imports no torch; may import ``results``, ``units`` and ``errors``.
"""
