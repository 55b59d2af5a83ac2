"""All protocols that a server speaks. A new one is a folder beside these, and a line here."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from tokenpod.service.dialects.fmaas.methods import METHODS as FMAAS
from tokenpod.service.dialects.generate_v1.methods import METHODS as GENERATE_V1
from tokenpod.service.dialects.generate_v2.methods import METHODS as GENERATE_V2
from tokenpod.service.dialects.generate_v3.methods import METHODS as GENERATE_V3
from tokenpod.service.dialects.tei.methods import METHODS as TEI
from tokenpod.service.dialects.tokenpod_admin.methods import METHODS as ADMIN
from tokenpod.service.dialects.tokenpod_v1.adapters import METHODS as ADAPTERS
from tokenpod.service.dialects.tokenpod_v1.embedding import METHODS as EMBEDDING
from tokenpod.service.dialects.tokenpod_v1.methods import METHODS as TOKENPOD_V1
from tokenpod.service.rpc.health import METHODS as HEALTH
from tokenpod.service.rpc.methods import Method, MethodTable
from tokenpod.service.rpc.reflection import METHODS as REFLECTION


def _of_an_extra() -> Sequence[Method]:
    """Rows of protocols whose stubs are packages of others, where these are installed."""
    if find_spec("smg_grpc_proto") is None:
        return ()
    from tokenpod.service.dialects.vllm.methods import METHODS

    return METHODS


#: Every rpc of every service.
TABLE = MethodTable(
    [
        *TOKENPOD_V1,
        *EMBEDDING,
        *ADAPTERS,
        *ADMIN,
        *GENERATE_V3,
        *GENERATE_V2,
        *GENERATE_V1,
        *FMAAS,
        *TEI,
        *_of_an_extra(),
        *HEALTH,
        *REFLECTION,
    ]
)
