"""A checkpoint's files: tensors, config fields, parts of nested checkpoints, and how they are written."""
