"""Who calls, as far as a call shows it."""

from __future__ import annotations

import hashlib
from typing import Any

#: Metadata in which a caller shows its token.
TOKEN_KEY = "authorization"  # noqa: S105 (a name, not a token)


def caller_of(context: Any) -> str:
    """A caller's identity as a digest: its certificate and its token; the same for all without."""
    digest = hashlib.blake2b(digest_size=8)
    for identity in context.peer_identities() or ():
        digest.update(b"\0certificate " + identity)
    for key, value in context.invocation_metadata() or ():
        if key == TOKEN_KEY:
            digest.update(b"\0token " + (value.encode() if isinstance(value, str) else value))
    return digest.hexdigest()
