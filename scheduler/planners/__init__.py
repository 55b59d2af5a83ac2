"""Who is in the next step: the queue, the batcher, a router's steps, beam searches."""
