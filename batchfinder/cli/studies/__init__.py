"""The commands that search many times: ``compare`` and ``sweep``.

Read ``options``, then ``compare``.
"""
