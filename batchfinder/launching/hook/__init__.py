"""A folder for PYTHONPATH: it enters every Python process of a launch, with no batchfinder there."""
