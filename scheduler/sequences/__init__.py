"""Sequences: their progress, their columns, and the rows and adapter slots that they take."""
