"""`vllm.grpc.engine`: the protocol by which the Shepherd Model Gateway drives engines."""
