"""Client of Tokenpod, a text-generation server that speaks gRPC."""

from importlib.metadata import version

__version__ = version("tokenpod-client")
