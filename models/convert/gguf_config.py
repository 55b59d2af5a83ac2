"""config.json from a GGUF file's metadata, for the architectures that are converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenpod.models.checkpoints.errors import ModelError

Config = dict[str, Any]

#: Frequencies of Llama 3.1 and later, of which GGUF has the resulting factors alone.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_TRAINED = 8192


class Metadata:
    """A file's values by name; those of its architecture without the prefix."""

    def __init__(self, values: Mapping[str, Any], path: object) -> None:
        self._values, self._path = values, path
        self.architecture = str(values.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        """A value of the architecture, or else a general one."""
        own = self._values.get(f"{self.architecture}.{name}")
        return self._values.get(name, default) if own is None else own

    def integer(self, name: str) -> int:
        """A whole number from 1 on; ModelError if there is none."""
        value = self.get(name)
        if not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self.error(f"{self.architecture}.{name} is {value!r}; expected a whole number")
        return value

    def real(self, name: str, default: float | None = None) -> float | None:
        """A number: the shortest that its 32 bits stand for, as 1e-06."""
        value = self.get(name, default)
        return None if value is None else float(str(np.float32(value)))

    def error(self, text: str) -> ModelError:
        """What is wrong with the file."""
        return ModelError(f"{self._path}: {text}")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What is special about an architecture's files.

    Attributes:
        name: transformers'.
        permuted: rows of queries and keys are in the order of neighbouring pairs.
        offset: what was added to the weights of norms.
        sandwich: norms on both sides of a branch, as Gemma 2 has them.
    """

    name: str
    model_type: str
    permuted: bool = False
    offset: int = 0
    sandwich: bool = False


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", offset=1, sandwich=True),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", offset=1, sandwich=True),
}


def config_of(
    data: Metadata, vocabulary: int, *, tied: bool, factors: npt.NDArray[np.float32] | None
) -> Config:
    """config.json's fields; ModelError for what is not supported.

    Args:
        data: of the file.
        vocabulary: rows of the embedding.
        tied: whether the head is the embedding.
        factors: of the rotation's frequencies; None: there are none.
    """
    about = ARCHITECTURES[data.architecture]
    if data.get("expert_count"):
        raise data.error(f"{data.architecture}.expert_count is set: experts are not supported")
    heads, hidden = data.integer("attention.head_count"), data.integer("embedding_length")
    head_dim = data.get("attention.key_length") or hidden // heads
    config: Config = {
        "architectures": [about.name],
        "model_type": about.model_type,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": data.integer("feed_forward_length"),
        "num_hidden_layers": data.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": data.get("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": data.integer("context_length"),
        "rms_norm_eps": data.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": data.real("rope.freq_base", 10_000.0),
        "tie_word_embeddings": tied,
    }
    rotated = data.get("rope.dimension_count", head_dim)
    values = data.get("attention.value_length", head_dim)
    if (rotated, values) != (head_dim, head_dim):
        raise data.error(f"heads of {head_dim} with {rotated} rotated, values of {values}")
    if (scaling := _scaling(data, factors)) is not None:
        config["rope_scaling"] = scaling
    for end in ("bos", "eos"):
        if (token := data.get(f"tokenizer.ggml.{end}_token_id")) is not None:
            config[f"{end}_token_id"] = token
    return {**config, **(_gemma(data, config) if about.sandwich else {})}


def _scaling(data: Metadata, factors: npt.NDArray[np.float32] | None) -> Config | None:
    kind = data.get("rope.scaling.type", "none")
    if factors is not None:
        return _llama3(data, factors)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise data.error(f"rope.scaling.type {kind!r} is not supported (supported: linear, yarn)")
    scaling: Config = {"rope_type": kind, "factor": data.real("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = data.integer(
            "rope.scaling.original_context_length"
        )
    return scaling


def _llama3(data: Metadata, factors: npt.NDArray[np.float32]) -> Config:
    """The parameters that give these factors."""
    factor = round(float(factors.max()), 3)
    scaling: Config = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    scaling["original_max_position_embeddings"] = _LLAMA3_TRAINED
    base = float(data.get("rope.freq_base", 10_000.0))
    waves = 2 * np.pi * base ** (np.arange(len(factors)) / len(factors))
    low, high = (_LLAMA3_TRAINED / value for value in _LLAMA3.values())
    smooth = (_LLAMA3_TRAINED / waves - 1) / 3
    between = 1 / ((1 - smooth) / factor + smooth)
    expected = np.where(waves > low, factor, np.where(waves < high, 1.0, between))
    if not np.allclose(factors, expected, rtol=1e-3):
        raise data.error("rope_freqs.weight has factors that are not Llama 3's")
    return scaling


def _gemma(data: Metadata, config: Config) -> Config:
    """Fields of Gemma 2 and 3. Of the largest of each, queries are scaled by the hidden size."""
    largest = {"gemma2": 46, "gemma3": 62}[data.architecture]
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    large = config["num_hidden_layers"] == largest
    fields = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if large else config["head_dim"],
        "sliding_window": data.integer("attention.sliding_window"),
        "attn_logit_softcapping": data.real("attn_logit_softcapping"),
        "final_logit_softcapping": data.real("final_logit_softcapping"),
    }
    if data.architecture == "gemma3":
        fields["rope_local_base_freq"] = data.real("rope.freq_base_swa", 10_000.0)
        fields["sliding_window_pattern"] = 6
    return fields
