"""How a command says what is wrong."""

from __future__ import annotations

import sys


def print_error(text: str, kind: str = "error") -> None:
    """Print one line on standard error, with `error:` or `warning:` before it."""
    print(f"{kind}: {text}", file=sys.stderr)
