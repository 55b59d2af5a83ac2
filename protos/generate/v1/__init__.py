"""`generate.v1`."""
