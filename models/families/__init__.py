"""One small file a family: its config map and its weight table."""
