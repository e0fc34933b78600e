"""The commands that search many times: ``compare`` and ``sweep``.

Read ``options`` and ``commands``, then ``compare`` and ``sweep``.
"""
