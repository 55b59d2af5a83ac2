"""The rpcs of `generate.v2`: TGI's alone."""

from __future__ import annotations

from tokenpod.protos.generate.v2 import generate_pb2 as pb
from tokenpod.service.dialects.tgi.methods import shard_methods

METHODS = shard_methods(pb)
