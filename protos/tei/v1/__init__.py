"""Messages and stubs of `tei.v1`."""
