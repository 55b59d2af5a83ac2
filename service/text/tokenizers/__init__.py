"""A model's tokenizer: its files, its chat templates, texts to tokens and tokens to texts."""
