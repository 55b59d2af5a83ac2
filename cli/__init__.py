"""The command line: the commands that talk to a server. Imports no torch."""
