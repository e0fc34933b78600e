"""The version of batchfinder, as in ``batchfinder.__version__`` and in each result."""

VERSION = "0.1.0"
