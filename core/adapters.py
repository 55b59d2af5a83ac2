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


def scale_bytes(outputs: int, summed: int, slots: int) -> int:
    """Bytes of what scales outputs (DoRA): a float32 for each output and slot, and for each once.

    `summed`: those of them that ranks sum, of which each rank has parts.
    """
    return 4 * ((slots + 1) * outputs + summed)
