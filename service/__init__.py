"""The gRPC face: a pod's server. Imports no torch."""
