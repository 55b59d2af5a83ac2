"""`tokenpod.shard.v1`."""
