"""Masks of constrained sequences: made by workers beside the step loop."""
