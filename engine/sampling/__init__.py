"""How a token is chosen from scores, on any device."""
