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

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> Any:
    """Look the version up when it is asked for: each of a pod's processes imports this package."""
    if name == "__version__":
        from importlib.metadata import version

        return version("tokenpod")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
