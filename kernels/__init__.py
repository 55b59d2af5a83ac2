"""The operations models call."""
