"""Attention over keys and values or latent rows: the reference, on a CPU, and on a GPU."""
