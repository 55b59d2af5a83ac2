"""Models from a hub or an object store, into a folder that a server reads."""
