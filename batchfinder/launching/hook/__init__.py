"""A folder for PYTHONPATH. Its files run in every Python process of a launch.

``sitecustomize`` makes one object of each other file's class. They get the PyTorch module, the
order of the launch (``make_order`` in launching/options.py, and its folder), ``report(event,
**facts)``, and each other, by the names of their files.
"""
