"""Batches drawn from the user's data, the longest first, or made from a text (``input_spec``).

Read ``loader``, ``drawn``, then ``lengths``. May import ``training``'s own files and ``errors``.
"""
