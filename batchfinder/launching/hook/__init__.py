"""A folder for PYTHONPATH. Its files run in every Python process of a launch."""
