"""The nouns that every other folder knows: no torch, no protobuf, no wire."""
