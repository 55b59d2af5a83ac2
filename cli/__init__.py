"""The command line: serve, generate, tokens, info, health, size and bench. Imports no torch."""
