"""Tiny checkpoints of models that make vectors, as sentence-transformers publishes them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional

from support.checkpoints.golden import randomise

VOCABULARY = 101
_BERT = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 66},
    "pad_token_id": 0,
}
_DECODER = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"intermediate_size": 48, "max_position_embeddings": 128},
}


@dataclass(frozen=True)
class EmbeddingKind:
    """A model, and the modules behind it."""

    #: transformers' class, and settings of its config.
    model: str
    settings: dict[str, Any]
    #: A key of 1_Pooling/config.json, or an activation of SPLADE; "": there is no modules.json.
    pooling: str = ""
    #: (numbers that come out, activation) of each.
    dense: tuple[tuple[int, str], ...] = ()
    normalize: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def splade(self) -> bool:
        """Whether vectors have a number for each token of the vocabulary."""
        return self.pooling.endswith("relu")


KINDS = {
    "minilm": EmbeddingKind("BertModel", _BERT, "pooling_mode_mean_tokens", normalize=True),
    "bge": EmbeddingKind("BertModel", _BERT, "pooling_mode_cls_token", normalize=True),
    "mpnet": EmbeddingKind(
        "MPNetModel",
        {**_BERT, "pad_token_id": 1},
        "pooling_mode_mean_tokens",
        normalize=True,
    ),
    "bge-m3": EmbeddingKind(
        "XLMRobertaModel",
        {**_BERT, "pad_token_id": 1, "type_vocab_size": 1},
        "pooling_mode_cls_token",
        normalize=True,
    ),
    "e5": EmbeddingKind(
        "XLMRobertaModel",
        {**_BERT, "pad_token_id": 1, "type_vocab_size": 1},
        "pooling_mode_mean_tokens",
    ),
    "gte-modernbert": EmbeddingKind(
        "ModernBertModel",
        {
            **_BERT,
            **{"num_hidden_layers": 4, "local_attention": 10, "max_position_embeddings": 128},
        },
        "pooling_mode_cls_token",
    ),
    "embedding-gemma": EmbeddingKind(
        "Gemma3TextModel",
        {
            **_DECODER,
            **{"num_hidden_layers": 3, "sliding_window": 12, "query_pre_attn_scalar": 8},
            "use_bidirectional_attention": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "pooling_mode_mean_tokens",
        dense=((64, "linear.Identity"), (32, "linear.Identity")),
        normalize=True,
    ),
    "qwen3": EmbeddingKind("Qwen3Model", _DECODER, "pooling_mode_lasttoken", normalize=True),
    "e5-mistral": EmbeddingKind(
        "MistralModel",
        {**_DECODER, "sliding_window": None},
        "pooling_mode_lasttoken",
        normalize=True,
    ),
    "qwen3-mean": EmbeddingKind("Qwen3Model", _DECODER, "pooling_mode_mean_tokens"),
    "qwen3-weighted": EmbeddingKind(
        "Qwen3Model", _DECODER, "pooling_mode_weightedmean_tokens", dense=((24, "activation.Tanh"),)
    ),
    "bert-max": EmbeddingKind("BertModel", _BERT, "pooling_mode_max_tokens"),
    "bert-alone": EmbeddingKind("BertModel", _BERT),
    "splade": EmbeddingKind("BertForMaskedLM", _BERT, "relu"),
    "splade-roberta": EmbeddingKind(
        "XLMRobertaForMaskedLM",
        {**_BERT, "pad_token_id": 1, "type_vocab_size": 1},
        "log1p_relu",
        normalize=True,
    ),
}

WRITING = {
    "qwen3-writes": EmbeddingKind(
        "Qwen3ForCausalLM", {**_DECODER, "max_position_embeddings": 1024}
    ),
}

LABELLED = {
    "bge-reranker": EmbeddingKind(
        "XLMRobertaForSequenceClassification",
        {**_BERT, "pad_token_id": 1, "type_vocab_size": 1, "num_labels": 1},
    ),
    "ms-marco": EmbeddingKind("BertForSequenceClassification", {**_BERT, "num_labels": 1}),
    "bert-labels": EmbeddingKind("BertForSequenceClassification", {**_BERT, "num_labels": 3}),
    "mpnet-labels": EmbeddingKind(
        "MPNetForSequenceClassification", {**_BERT, "pad_token_id": 1, "num_labels": 2}
    ),
    "gte-reranker": EmbeddingKind(
        "ModernBertForSequenceClassification",
        {**_BERT, "local_attention": 10, "num_labels": 1, "classifier_pooling": "mean"},
    ),
    "qwen3-labels": EmbeddingKind(
        "Qwen3ForSequenceClassification", {**_DECODER, "num_labels": 3, "pad_token_id": 0}
    ),
}


def save_tokenizer(folder: Path, kind: str) -> None:
    """A tokenizer of words of one letter, with special tokens as models of the kind have them."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "yes", "no"]
    words += [chr(code) for code in range(33, 33 + VOCABULARY - len(words))]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex("yes|no|."), "isolated"
    )
    backend.add_special_tokens(["[PAD]", "[CLS]", "[SEP]"])
    framed = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}
    if kind == "decoder":
        framed = {"single": "$A [SEP]", "pair": "$A $B:1 [SEP]:1"}
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        **framed, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.save(str(folder / "tokenizer.json"))


class EmbeddingGolden:
    """The checkpoint of a kind in a folder, and what transformers makes of texts.

    Args:
        kind: of `KINDS` or `LABELLED`.
        folder: where it is saved; for it alone.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = {**KINDS, **LABELLED, **WRITING}[kind]
        self.folder = folder
        model_class = getattr(transformers, self.kind.model)
        config = model_class.config_class(**self.kind.settings)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(7)
            self.model = model_class(config).eval()
            randomise(self.model)
            self.dense = []
            width = config.hidden_size
            for rows, activation in self.kind.dense:
                layer = torch.nn.Linear(width, rows, bias=activation.endswith("Tanh"))
                self.dense.append((layer, activation))
                width = rows
        self.width = width if not self.kind.splade else VOCABULARY
        # Sliding windows of an encoder are derived from the config's number again when it is read.
        self.model.save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        if "sliding_window" in self.kind.settings:
            written["sliding_window"] = self.kind.settings["sliding_window"]
            (folder / "config.json").write_text(json.dumps(written))
        if self.kind.pooling:
            self._save_modules()

    def _save_modules(self) -> None:
        modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
        if self.kind.splade:
            modules = [("", "MLMTransformer"), ("1_Pooling", "SpladePooling")]
            about = {"pooling_strategy": "max", "activation_function": self.kind.pooling}
            about |= {"word_embedding_dimension": VOCABULARY}
        else:
            about = dict.fromkeys(["pooling_mode_cls_token", "pooling_mode_mean_tokens"], False)
            about |= {self.kind.pooling: True, "word_embedding_dimension": 32}
        self._write("1_Pooling/config.json", about)
        for at, (layer, activation) in enumerate(self.dense, start=2):
            name = f"{at}_Dense"
            modules.append((name, "Dense"))
            about = {
                **{"in_features": layer.in_features, "out_features": layer.out_features},
                "bias": layer.bias is not None,
                "activation_function": f"torch.nn.modules.{activation}",
            }
            self._write(f"{name}/config.json", about)
            tensors = {f"linear.{key}": value for key, value in layer.state_dict().items()}
            save_file(tensors, self.folder / name / "model.safetensors")
        if self.kind.normalize:
            modules.append((f"{len(modules)}_Normalize", "Normalize"))
        sparse = ("MLMTransformer", "SpladePooling")
        homes = {x: f"{'sparse_encoder.' * (x in sparse)}models" for _, x in modules}
        entries = [
            {
                "idx": at,
                "name": str(at),
                "path": path,
                "type": f"sentence_transformers.{homes[x]}.{x}",
            }
            for at, (path, x) in enumerate(modules)
        ]
        self._write("modules.json", entries)

    def _write(self, name: str, content: Any) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))

    def states(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), hidden] the states behind the last norm."""
        with torch.no_grad():
            return self.model.base_model(input_ids=torch.tensor([tokens])).last_hidden_state[0]

    def vector(self, tokens: list[int], left_out: int = 0) -> torch.Tensor:
        """[width] of a text, by the definition of its modules."""
        states = self.states(tokens)
        match self.kind.pooling:
            case "relu" | "log1p_relu":
                pooled = self.logits(tokens).relu().log1p().amax(0)
                pooled = pooled.log1p() if self.kind.pooling == "log1p_relu" else pooled
            case "pooling_mode_cls_token":
                pooled = states[0]
            case "pooling_mode_lasttoken":
                pooled = states[-1]
            case "pooling_mode_max_tokens":
                pooled = states.amax(0)
            case "pooling_mode_weightedmean_tokens":
                weights = torch.arange(1, len(tokens) + 1)[:, None].float()
                pooled = (states * weights).sum(0) / weights.sum()
            case _:
                pooled = states[left_out:].mean(0)
        with torch.no_grad():
            for layer, activation in self.dense:
                pooled = layer(pooled)
                pooled = torch.tanh(pooled) if activation.endswith("Tanh") else pooled
        return functional.normalize(pooled, dim=0) if self.kind.normalize else pooled

    def logits(self, tokens: list[int], second: int = 0) -> torch.Tensor:
        """[labels], or of each token [n, vocabulary].

        Tokens from number `second` on are of a second text; 0: there is none.
        """
        given = {"input_ids": torch.tensor([tokens])}
        if second:
            kinds = [0] * second + [1] * (len(tokens) - second)
            given["token_type_ids"] = torch.tensor([kinds])
        with torch.no_grad():
            return self.model(**given).logits[0]
