"""The sets of operations: the reference, a CPU's, and those of NVIDIA GPUs."""
