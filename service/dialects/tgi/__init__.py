"""What the generations of the shard protocol of TGI share."""
