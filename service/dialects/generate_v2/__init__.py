"""`generate.v2`: the shard protocol of TGI 1.3 to 2.0."""
