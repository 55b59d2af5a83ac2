"""Text Embeddings Inference's protocol."""
