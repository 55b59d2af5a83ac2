"""Tokenpod's own wire formats, between its pods."""
