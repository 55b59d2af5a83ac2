"""Rotation and the write to the KV pool: the reference, on a CPU, and on a GPU; the pool itself."""
