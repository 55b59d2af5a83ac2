"""What makes rows of embeddings of images."""
