"""A checkpoint's files: tensors, config fields, nested checkpoints, and how they are written."""
