"""What running a step is on any device: its integers, its results, and the order of its draws."""
