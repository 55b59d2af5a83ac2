"""Which of transformers' causal models this build serves: tried, one by one, on tiny models."""
