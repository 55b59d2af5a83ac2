"""Where the keys and values of sequences live, and what becomes of them when they must give way."""
