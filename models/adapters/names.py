"""Names of tensors in an adapter's file, as PEFT writes them."""

from __future__ import annotations

_PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
EMBEDDING_DOWN, EMBEDDING_UP = ".lora_embedding_A", ".lora_embedding_B"
#: Of outputs' lengths, which DoRA has.
LENGTHS = (".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def module_name(name: str) -> str:
    """The base's name for a tensor of an adapter."""
    own = name.removeprefix(_PREFIX)
    return own.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
