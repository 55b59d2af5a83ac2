"""`tokenpod.v1`: the public API."""
