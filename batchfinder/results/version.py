"""The version of batchfinder, as in each result, and the version of the JSON that it writes."""

VERSION = "0.1.0"

SCHEMA_VERSION = 1
"""The JSON's ``schema_version``: while it stays the same, names keep their meaning."""
