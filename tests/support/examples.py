"""How many examples a property test takes: a tenth in `make test`, all in `make test-all`."""

from __future__ import annotations

import os

#: Set by `make test-all`.
ALL = os.environ.get("EXAMPLES") == "all"
_SHARE = 10
_LEAST = 15


def examples(count: int) -> int:
    """Of `count` examples, how many are tried in this run; never less than 15 of more."""
    return count if ALL else min(count, max(count // _SHARE, _LEAST))
