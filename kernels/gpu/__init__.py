"""What all kernels on a GPU share: launches, writes to peers, a step's tokens."""
