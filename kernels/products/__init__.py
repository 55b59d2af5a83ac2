"""Products with a weight: the reference, on a CPU, and on a GPU."""
