"""The embedded model: data files; see README.md beside this file."""
