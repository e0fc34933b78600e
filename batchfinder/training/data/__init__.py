"""Batches drawn from the user's data: the longest first, others as in training.

Read ``loader``, ``drawn``, then ``lengths``. May import ``training``'s own files and ``errors``.
"""
