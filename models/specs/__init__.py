"""Models as data: specs, and the table of weights that follows from them."""
