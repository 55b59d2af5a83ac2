"""What the KV pool's bookkeeping is made of: slots, the prefix tree, the offload tier."""
