"""batchfinder inside somebody's own training: the guard against out-of-memory errors.

Read ``guard.py``. It may import everything below the finder: devices, training, errors.
"""
