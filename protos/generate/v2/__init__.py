"""`generate.v2`."""
