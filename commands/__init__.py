"""The server's commands: serve, size, models, convert and download. Imports no torch."""
