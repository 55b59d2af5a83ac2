"""Masks of constrained sequences: quick ones by the step loop, slow ones by workers beside it."""
