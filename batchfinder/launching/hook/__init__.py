"""A folder for PYTHONPATH that enters every Python process of a launch."""
