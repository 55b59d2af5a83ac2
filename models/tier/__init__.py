"""Models that transformers' own code computes, over our KV pool and with our attention."""
