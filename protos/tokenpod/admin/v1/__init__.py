"""Stubs of `tokenpod.admin.v1`."""
