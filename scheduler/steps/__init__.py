"""One step: what it computes of whom, and how long steps take."""
