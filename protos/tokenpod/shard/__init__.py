"""From the leader's rank to the others."""
