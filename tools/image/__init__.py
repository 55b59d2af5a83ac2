"""`make image`: build an image for real, look into it, and generate with it."""
