"""Tokenpod: a gRPC-only text-generation server.

One pod speaks the shard protocol of Hugging Face's Text Generation Inference, so that its routers
can drive it, and has a batcher of its own behind a streaming `Generate` rpc. The repository's
top-level folders are this package's subpackages; `cli/` and `protos/` are the client's:

- `tokenpod_client.protos`: the wire formats; `tokenpod_client.cli`: the command line;
- `tokenpod.service`: the gRPC server and its clients (no torch);
- `tokenpod.scheduler`: who runs next and where its keys and values live (no torch, no protobuf);
- `tokenpod.engine`: the step loop and what executes a step;
- `tokenpod.kernels`, `tokenpod.models`: what a step computes.
"""

from importlib.metadata import version

__version__ = version("tokenpod")
