"""Which of transformers' classes a config.json names, and its config as transformers reads it.

Only classes of the installed library are looked at. What a checkpoint says of code of its own
(`auto_map`) is ignored, and nothing is ever fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.tier.bounds import check_bounds
from tokenpod.models.tier.errors import NotServed

#: Fields of a config.json that say how to run code, or what to do besides the model's arithmetic.
_IGNORED = ("auto_map", "custom_pipelines", "attn_implementation", "_attn_implementation")
#: Rotations whose frequencies transformers changes once a text is longer than trained: cached keys
#: would no longer fit.
_CHANGING = ("dynamic", "longrope")


def model_class(architecture: str) -> type[PreTrainedModel]:
    """transformers' class of that name. Raises NotServed if it generates no text by itself."""
    names = {
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values(),
    }
    found = getattr(transformers, architecture, None) if architecture in names else None
    if found is None:
        raise _unknown()
    return cast(type[PreTrainedModel], found)


def _unknown() -> NotServed:
    return NotServed(f"transformers {transformers.__version__} has no such causal model")


def config_of(found: type[PreTrainedModel], fields: Fields) -> PreTrainedConfig:
    """The class's config. Raises NotServed for what can't be served."""
    kind = found.config_class
    assert kind is not None
    check_bounds(fields.values)
    asked = fields.text("model_type", kind.model_type)
    if asked != kind.model_type:
        raise NotServed(f"model_type is {asked}; {found.__name__} has {kind.model_type}")
    values = {name: value for name, value in plain(fields.values).items() if name not in _IGNORED}
    try:
        config = kind.from_dict(values)
    except Exception as error:  # whatever a config's own checks raise
        raise NotServed(f"transformers refuses its config ({_one_line(error)})") from None
    causal = found.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if not (causal or config.is_encoder_decoder):
        raise _unknown()  # it hears or sees, and that is not its text model alone
    return config


def check_stateless(found: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Raise NotServed for a class whose text is not all that keys and values come from."""
    if getattr(found, "_is_stateful", False):
        raise NotServed("its layers keep a recurrent state, which is no list of keys and values")
    if config.is_encoder_decoder:
        raise NotServed("it is an encoder with a decoder")


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As json gave it; views of fields with other values become plain again."""
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        # How transformers writes what json has no number for.
        return float(value["__float__"]) if [*value] == ["__float__"] else plain(value)
    return [_plain(each) for each in value] if isinstance(value, list) else value


def max_positions(config: PreTrainedConfig, served: int | None) -> int:
    """The longest text, in tokens.

    Raises NotServed if nobody says it, or if its rotation changes before it ends.
    """
    text = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    found = next((n for name in names if isinstance(n := getattr(text, name, None), int)), None)
    if found is None and served is None:
        raise NotServed("config.json has no max_position_embeddings; set --max-total-tokens")
    longest = found or served or 0
    wanted = min(longest, served or longest)
    for parameters in _rotations(text):
        kind = parameters.get("rope_type", parameters.get("type"))
        trained = parameters.get(
            "original_max_position_embeddings",
            getattr(text, "original_max_position_embeddings", None) or longest,
        )
        if kind in _CHANGING and wanted > trained:
            raise NotServed(
                f"its rotation ({kind}) changes after {trained} tokens, and {wanted} are to be "
                f"served: set --max-total-tokens {trained}"
            )
    return longest


def _rotations(config: PreTrainedConfig) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
