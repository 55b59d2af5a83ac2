"""Every setting of the server: their table, what contradicts what, where values come from."""
