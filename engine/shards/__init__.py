"""One model over several ranks: the leader's plans, and how the ranks watch each other."""
