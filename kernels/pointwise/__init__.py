"""Embeddings, norms and the gated unit: the reference, on a CPU, and on a GPU."""
