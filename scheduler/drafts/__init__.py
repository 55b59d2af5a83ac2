"""Guesses of the tokens that come next, and tokens that are known: who has them, and how many."""
