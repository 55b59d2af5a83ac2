"""Text models within checkpoints that also see or hear: where their config and tensors lie.

    config.json   the whole's, with the text model's in a field of it (or beside it: `flat`)
    tensors       the text model's behind a prefix, its head beside it, and other parts

Such a checkpoint is served as text, by whatever serves its text model alone. The other parts are
counted and not read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields

#: Before names of a text model's tensors: as transformers has them, as older files do, and as files
#: do that name their text model as if it were alone.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
#: Of a whole config; the text model's own may leave them out.
_OUTER = (
    *("dtype", "torch_dtype", "eos_token_id"),
    *("quantization_config", "compression_config"),
)


@dataclass(frozen=True, slots=True)
class Nesting:
    """How checkpoints of an architecture hold their text model."""

    #: `model_type` of the text model, the first where the config does not say; empty: any that is
    #: in `TEXT_MODELS`.
    texts: tuple[str, ...] = ()
    #: What names of other parts' tensors begin with, behind "model." or nothing.
    parts: tuple[str, ...] = ("vision_tower", "multi_modal_projector")
    #: The field of config.json with the text model's config, by its path.
    config: str = "text_config"
    #: Older files have the text model's fields in config.json itself.
    flat: bool = False
    #: Before names of the text model's tensors, by layout.
    prefixes: tuple[str, ...] = _PREFIXES[:2]

    @property
    def unused(self) -> tuple[str, ...]:
        """Beginnings of names of tensors that are not read."""
        return tuple(f"{outer}{part}" for part in self.parts for outer in ("", "model."))


def _qwen(*texts: str, parts: tuple[str, ...] = ("visual",), flat: bool = False) -> Nesting:
    return Nesting(texts, parts, flat=flat, prefixes=_PREFIXES)


def _omni(text: str) -> Nesting:
    """A thinker, which writes text, and what makes speech of it."""
    parts = ("thinker.audio_tower", "thinker.visual", "talker", "token2wav", "code2wav")
    return Nesting((text,), parts, "thinker_config.text_config", prefixes=("thinker.model.",))


_MINICPM = Nesting(("qwen3_5_text",), ("vision_tower", "merger"))
_KIMI = Nesting(("deepseek_v3", "kimi_k2"), ("vision_tower", "mm_projector"))
_IDEFICS = Nesting(
    ("llama",), ("vision_model", "connector"), prefixes=("model.text_model.", "text_model.model.")
)
_LLAVA = Nesting(parts=("vision_tower", "multi_modal_projector", "image_newline"))

#: By the architecture that config.json names.
NESTED: Mapping[str, Nesting] = {
    "AyaVisionForConditionalGeneration": Nesting(("cohere2", "cohere")),
    "Cohere2VisionForConditionalGeneration": Nesting(("cohere2",)),
    "Exaone4_5_ForConditionalGeneration": Nesting(("exaone4",), ("visual",)),
    "Gemma3ForConditionalGeneration": Nesting(("gemma3_text",)),
    "Gemma4ForConditionalGeneration": Nesting(
        ("gemma4_text",), ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
    ),
    "Glm4vForConditionalGeneration": _qwen("glm4v_text"),
    "Glm46VForConditionalGeneration": _qwen("glm4v_text", "glm4v_moe_text"),
    "Glm4vMoeForConditionalGeneration": _qwen("glm4v_moe_text"),
    "GlmAsrForConditionalGeneration": Nesting(("llama",), ("audio_tower", "multi_modal_projector")),
    "GotOcr2ForConditionalGeneration": Nesting(("qwen2",)),
    "InternVLChatModel": Nesting(parts=("vision_model", "mlp1"), config="llm_config"),
    "InternVLForConditionalGeneration": Nesting(),
    "KimiK25ForConditionalGeneration": _KIMI,
    "Kimi_K25ForConditionalGeneration": _KIMI,
    "Idefics3ForConditionalGeneration": _IDEFICS,
    "Lfm2VlForConditionalGeneration": Nesting(("lfm2",)),
    "LightOnOcrForConditionalGeneration": Nesting(
        ("qwen3",), ("vision_encoder", "vision_projection", "vision_tower", "multi_modal_projector")
    ),
    "Llama4ForConditionalGeneration": Nesting(
        ("llama4_text",), ("vision_model", "multi_modal_projector")
    ),
    "LlavaForConditionalGeneration": _LLAVA,
    "LlavaNextForConditionalGeneration": _LLAVA,
    "LlavaOnevisionForConditionalGeneration": _LLAVA,
    "MiniCPMV4_6ForConditionalGeneration": _MINICPM,
    "MiniCPMV4_7ForConditionalGeneration": _MINICPM,
    "MiniCPMOcrForConditionalGeneration": _MINICPM,
    "Mistral3ForConditionalGeneration": Nesting(("mistral", "ministral3")),
    "Ovis2ForConditionalGeneration": Nesting(
        ("qwen2",), ("vision_tower", "visual_embeddings_table")
    ),
    "PaliGemmaForConditionalGeneration": Nesting(("gemma", "gemma2")),
    "Qwen2AudioForConditionalGeneration": Nesting(
        ("qwen2",), ("audio_tower", "multi_modal_projector")
    ),
    "Qwen2VLForConditionalGeneration": _qwen("qwen2_vl_text", flat=True),
    "Qwen2_5OmniForConditionalGeneration": _omni("qwen2_5_omni_text"),
    "Qwen2_5OmniModel": _omni("qwen2_5_omni_text"),
    "Qwen2_5_VLForConditionalGeneration": _qwen("qwen2_5_vl_text", flat=True),
    "Qwen3ASRForConditionalGeneration": Nesting(
        ("qwen3",), ("audio_tower", "multi_modal_projector")
    ),
    "Qwen3OmniMoeForConditionalGeneration": _omni("qwen3_omni_moe_text"),
    "Qwen3VLForConditionalGeneration": _qwen("qwen3_vl_text"),
    "Qwen3VLMoeForConditionalGeneration": _qwen("qwen3_vl_moe_text"),
    "Qwen3_5ForConditionalGeneration": _qwen("qwen3_5_text", parts=("visual", "mtp")),
    "Qwen3_5MoeForConditionalGeneration": _qwen("qwen3_5_moe_text", parts=("visual", "mtp")),
    "SmolVLMForConditionalGeneration": _IDEFICS,
    "VideoLlama3ForConditionalGeneration": Nesting(("qwen2",), ("vision_model", "projector")),
    "VipLlavaForConditionalGeneration": _LLAVA,
    "VoxtralForConditionalGeneration": Nesting(
        ("llama", "ministral3"), ("audio_tower", "multi_modal_projector")
    ),
}

#: Which architecture a text model is, by its `model_type`: a family's, or a class of transformers.
TEXT_MODELS: Mapping[str, str] = {
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
#: What a text model does where its config does not say it, and its architecture's default differs.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "glm4v_text": {"partial_rotary_factor": 1.0},
    "qwen3_omni_moe_text": {"norm_topk_prob": True},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}


class Text(NamedTuple):
    """The text model that a config.json describes: the whole model, or a part of it."""

    #: By itself: a family's, or a class of transformers.
    architecture: str
    #: Its config; `architectures` stays what config.json says.
    fields: Fields
    #: None: it is the whole model.
    nesting: Nesting | None


def text_of(fields: Fields) -> Text:
    """The text model of a config.json. Raises ModelError, naming the field that it refuses."""
    names = fields.texts("architectures")
    published = names[0] if names else "none"
    nesting = NESTED.get(published)
    if nesting is None:
        return Text(published, fields, None)
    path, levels = nesting.config.split("."), [fields]
    if not (nesting.flat and path[0] not in fields):
        for name in path:
            levels.append(levels[-1].fields(name))
    text, *outer = reversed(levels)
    kinds = nesting.texts or tuple(TEXT_MODELS)
    said = text.text("model_type", nesting.texts[0] if nesting.texts else None)
    # A flat config says what the whole is.
    kind = kinds[0] if text is fields else said
    if kind not in kinds:
        raise ModelError(
            f"{text.source}: model_type {kind!r} is not supported (supported: {', '.join(kinds)})"
        )
    own = text.defaulting(**_DEFAULTS.get(kind, {}), model_type=kind)
    for each in outer:
        own = own.defaulting(**{name: each.values[name] for name in _OUTER if name in each})
    # Whether the head is the embedding is a matter of who has both, where that says so.
    tied = (each.values.get("tie_word_embeddings") for each in (*outer[:1], text))
    first = next((value for value in tied if value is not None), None)
    own = own.replacing(architectures=[*names], tie_word_embeddings=first)
    return Text(TEXT_MODELS[kind], own, nesting)


def split(names: set[str], nesting: Nesting | None) -> dict[str, int]:
    """How many of a checkpoint's tensors belong to each part that is not read."""
    if nesting is None:
        return {}
    parts = {part: sum(name.startswith(part) for name in names) for part in nesting.unused}
    return {part: count for part, count in parts.items() if count}


class TextTensors:
    """A checkpoint's tensors of its text model, under the names that it would have alone.

    Names that belong to no part stay as they are, so who knows all names of the text model finds
    them to be none of its.
    """

    def __init__(self, checkpoint: Checkpoint, nesting: Nesting | None) -> None:
        self._checkpoint = checkpoint
        #: How many tensors belong to each part that is not read.
        self.unused = split(checkpoint.names, nesting)
        skipped = nesting.unused if nesting else ()
        self._prefix = _prefix(checkpoint.names, nesting)
        self._stored = {
            _alone(name, self._prefix): name
            for name in checkpoint.names
            if not name.startswith(skipped)
        }

    @property
    def names(self) -> list[str]:
        """As the text model alone has them."""
        return [*self._stored]

    def stored(self, name: str) -> str:
        """What the checkpoint calls a tensor, or would."""
        missing = self._prefix + name.removeprefix("model.") if name.startswith("model.") else name
        return self._stored.get(name, missing)

    def size(self, name: str) -> int:
        """Bytes of a tensor."""
        stored, there = self._stored[name], self._checkpoint
        return math.prod(there.shape(stored)) * there.number_bytes(stored)

    def outline(self, name: str) -> torch.Tensor:
        """A tensor's shape and type, without numbers: nothing is read."""
        stored, there = self._stored[name], self._checkpoint
        return torch.empty(there.shape(stored), dtype=there.dtype(stored), device="meta")

    def read(self, name: str) -> torch.Tensor:
        """A tensor as stored."""
        return self._checkpoint.read(self._stored[name])


def _prefix(names: set[str], nesting: Nesting | None) -> str:
    """Before the names of the text model's tensors in these files; alone it has "model."."""
    prefixes = nesting.prefixes if nesting else ()
    return next((x for x in prefixes if any(name.startswith(x) for name in names)), "model.")


def _alone(name: str, prefix: str) -> str:
    if name.startswith(prefix):
        return f"model.{name.removeprefix(prefix)}"
    # The head lies beside the base.
    return name.removeprefix(prefix.removesuffix("model.")) if prefix.endswith(".model.") else name
