"""The commands that search many times, ``compare`` and ``sweep``, and what ``find`` asks of data.

Read ``options`` and ``commands``, then ``compare`` and ``sweep``; ``on_data`` is for ``find``.
"""
