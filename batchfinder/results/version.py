"""The version of batchfinder: what ``batchfinder.__version__`` and each result name."""

VERSION = "0.1.0"
