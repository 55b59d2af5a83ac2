"""Prompts to tokens and tokens to answers: what is done at once, and what by others."""
