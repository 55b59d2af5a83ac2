"""Stubs of `tokenpod.v1`, the public API."""
