"""The other processes of a pod: engines, ranks and front ends, and the links to them."""
