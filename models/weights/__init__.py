"""Weights as a checkpoint's tensors make them: their names, segments, axes and shards."""
