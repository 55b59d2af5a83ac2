"""Reference operations in torch: the specification, and what runs on a CPU."""
