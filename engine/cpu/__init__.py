"""Steps and draws on a CPU."""
