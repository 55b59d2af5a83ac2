"""`generate.v3`: `Generate` and `Tokens`, and the shard protocol of TGI 2.4.1 to 3.3.7."""
