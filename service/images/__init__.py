"""Images of requests: what is checked before anything is decoded, and what the model gets."""
