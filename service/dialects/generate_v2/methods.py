"""The rpcs of `generate.v2`: TGI's alone."""

from __future__ import annotations

from tokenpod.service.dialects.tgi.methods import shard_methods
from tokenpod_client.protos.generate.v2 import generate_pb2 as pb

METHODS = shard_methods(pb)
