"""Fields that say a model computes something that its family does not read: a newer kind's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields

#: They change what a model computes, and most need no tensors that would show it.
ARITHMETIC = (
    *("alibi", "attention_chunk_size", "attention_k_eq_v", "attention_multiplier"),
    *("attention_value_scale", "attn_logit_softcapping", "attn_output_gate", "clip_qkv"),
    *("compress_ratios", "embedding_multiplier", "final_logit_softcapping", "hc_mult"),
    *("index_topk", "key_multiplier", "logit_scale", "logits_scaling", "nope_layer_interval"),
    *("no_rope_layers", "num_kv_shared_layers", "parallel_attn", "residual_multiplier"),
    *("scale_depth", "scale_emb", "swiglu_limit", "zero_expert_num"),
)
#: What each of them is where it changes nothing.
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, [], {})


class Noted(dict[str, Any]):
    """A config's values, which know which of them were asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict's."""
        self.asked.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)


def check_all_read(fields: Fields, noted: Noted, architecture: str) -> None:
    """Raise ModelError for the first field that would change what nobody has asked about.

    Args:
        fields: of the model.
        noted: the same, which its family has read.
        architecture: the model's.
    """
    for name in ARITHMETIC:
        value = fields.values.get(name)
        if name not in noted.asked and value not in _NEUTRAL:
            raise ModelError(
                f"{fields.source}: {name} is {value!r}, which is not supported for {architecture}"
            )
