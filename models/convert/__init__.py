"""Checkpoints of other kinds, made into safetensors; no server imports it."""
