"""From options and a model to an executor that is warm and has its KV pool."""
