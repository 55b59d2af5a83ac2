"""Decoders built from specs, and what engines know of a loaded model."""
