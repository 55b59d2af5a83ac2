"""The gRPC face: server, client, command line. Imports no torch."""
