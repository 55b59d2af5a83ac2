"""What kinds of adapters there are, whoever speaks of them."""

from __future__ import annotations

from enum import IntEnum


class AdapterKind(IntEnum):
    """What an adapter does to the model."""

    #: Adds a product of two factors of low rank to weights; takes a slot while it runs.
    LORA = 1
    #: Puts embeddings of virtual tokens before the prompt (prompt tuning, P-tuning).
    PROMPT = 2
    #: Puts keys and values of virtual tokens before the prompt (prefix tuning).
    PREFIX = 3
