"""What layers are made of: products, norms, positions and mixers."""
