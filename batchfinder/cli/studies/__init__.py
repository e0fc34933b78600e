"""The commands that search many times, and the measurements that need the user's data.

Read ``commands``, then ``compare`` and ``sweep``; by itself ``on_data``.
"""
