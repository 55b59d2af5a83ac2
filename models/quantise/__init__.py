"""Quantised checkpoints of dense ones, in compressed-tensors' layout, by a process of its own."""
