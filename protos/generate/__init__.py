"""TGI's shard protocol in its three wire generations."""
