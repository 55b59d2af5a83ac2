"""Low-rank adapters: the reference, and on a GPU."""
