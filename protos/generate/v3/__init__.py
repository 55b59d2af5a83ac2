"""`generate.v3`."""
