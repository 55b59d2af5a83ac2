"""`generate.v1`: the shard protocol of TGI 0.9.4 to 1.2, with the Tokens of a LightLLM fork."""
