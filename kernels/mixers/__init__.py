"""What mixes tokens by a state instead of keys and values."""
