"""Text to tokens and back: tokenizers, chat templates, stops, and their processes."""
