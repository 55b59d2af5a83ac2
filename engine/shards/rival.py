"""A leader that looks whether there is another one, before it waits for followers in vain."""

from __future__ import annotations

import grpc

from tokenpod.core.placement import ShardTls
from tokenpod.engine.shards.facts import PROTOCOL
from tokenpod.engine.shards.transport import METHOD, channel
from tokenpod_client.protos.tokenpod.shard.v1 import shard_pb2 as pb

_ANSWER_SECONDS = 2.0


def find_rival(address: str, generation: str, tls: ShardTls | None) -> str | None:
    """What is wrong with who answers at the address where followers look; None: nothing, or nobody.

    Args:
        address: where followers reach the plans of `generation`, if all is well.
        generation: the asker's own.
        tls: the pods' certificates.
    """
    hello = pb.FollowRequest(hello=pb.Hello(protocol=PROTOCOL, generation=generation))
    with channel(address, tls) as link:
        follow = link.stream_stream(
            METHOD,
            request_serializer=pb.FollowRequest.SerializeToString,
            response_deserializer=pb.FollowResponse.FromString,
        )
        try:
            first = next(follow(iter([hello]), timeout=_ANSWER_SECONDS), None)
        except grpc.RpcError:
            # Names of pods take time to be known, and a network may not lead back to its sender.
            return None
    if first is None or not first.HasField("refused"):
        return None
    return f"another leader answered at {address}: {first.refused.reason}"
