"""Loops compiled to machine code for a CPU: what all of them share."""
