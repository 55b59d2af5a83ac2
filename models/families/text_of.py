"""Checkpoints of text and images whose text model is of a family served here: as text alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tokenpod.models.errors import ModelError
from tokenpod.models.families.family import Family
from tokenpod.models.families.gemma3 import GEMMA3
from tokenpod.models.families.mistral import MINISTRAL3, MISTRAL
from tokenpod.models.fields import Fields
from tokenpod.models.spec import ModelSpec

#: Of a whole checkpoint; the text model's own config may leave them out.
_OUTER = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")

#: Before the names of the text model, by the older and the newer layout.
_PREFIXES = ("language_model.model.", "model.language_model.")

#: What names of tensors begin with that see images.
_IMAGES = tuple(
    f"{outer}{part}."
    for outer in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)


def _text_of(architecture: str, families: Mapping[str, Family]) -> Family:
    """The families of text models, which share their names, by `model_type` in `text_config`."""

    def spec(fields: Fields, served: int | None) -> ModelSpec:
        text, whole = fields.fields("text_config"), fields.values
        kind = text.text("model_type", next(iter(families)))
        if kind not in families:
            raise ModelError(
                f"{text.source}: model_type {kind!r} is not supported "
                f"(supported: {', '.join(families)})"
            )
        outer = {name: whole[name] for name in _OUTER if whole.get(name) is not None}
        inner = text.defaulting(**outer, architectures=[architecture])
        return replace(families[kind].spec(inner, served), architecture=architecture)

    first = next(iter(families.values()))
    return replace(
        first, architectures=(architecture,), spec=spec, prefixes=_PREFIXES, unused=_IMAGES
    )


GEMMA3_TEXT = _text_of("Gemma3ForConditionalGeneration", {"gemma3_text": GEMMA3})
MISTRAL3_TEXT = _text_of(
    "Mistral3ForConditionalGeneration", {"mistral": MISTRAL, "ministral3": MINISTRAL3}
)
