"""Mixtures of experts: the reference, on a CPU, and on a GPU."""
