"""What a checkpoint says of vectors: its head of labels, or the files of sentence-transformers.

modules.json                         the modules in order: transformer, pooling, dense, normalize
1_Pooling/config.json                how tokens become one vector
2_Dense/config.json, safetensors     a product of it
sentence_bert_config.json            max_seq_length
config_sentence_transformers.json    texts that stand before others (prompts)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenpod.core.task import Task
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import MAX_JSON_BYTES, Fields, read_fields
from tokenpod.models.pooling.head import ACTIVATIONS
from tokenpod.models.specs.pooling_spec import Dense, Mode, PoolingSpec
from tokenpod.models.specs.spec import ModelSpec

#: Flags of older files by the mode that they switch on.
_FLAGS = {
    "pooling_mode_cls_token": Mode.CLS,
    "pooling_mode_mean_tokens": Mode.MEAN,
    "pooling_mode_max_tokens": Mode.MAX,
    "pooling_mode_weightedmean_tokens": Mode.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": Mode.LAST_TOKEN,
}
#: What newer files call them.
_MODES = {
    "cls": Mode.CLS,
    "mean": Mode.MEAN,
    "max": Mode.MAX,
    "weightedmean": Mode.WEIGHTED_MEAN,
    "lasttoken": Mode.LAST_TOKEN,
}
_LABELLED = "ForSequenceClassification"
#: Most modules, labels and prompts that files may name.
_MOST = 4096


def task_of(folder: Path, architecture: str, asked: str, *, encoder: bool) -> Task:
    """What a checkpoint is for.

    Args:
        folder: with its files.
        architecture: as config.json names it.
        asked: by the operator; "auto": what the files show.
        encoder: whether each of its tokens sees those behind it.

    Raises:
        ModelError: the operator asks for what it can't do.
    """
    labelled = architecture.endswith(_LABELLED)
    if labelled:
        found = Task.CLASSIFY if _labels(folder) > 1 else Task.SCORE
    elif (folder / "modules.json").is_file() or encoder:
        found = Task.EMBED
    else:
        found = Task.GENERATE
    if asked == "auto":
        return found
    task = Task(asked)
    fits = {
        Task.GENERATE: not (labelled or encoder),
        Task.EMBED: not labelled,
        Task.SCORE: labelled or not encoder,
        Task.CLASSIFY: labelled,
    }
    if not fits[task]:
        raise ModelError(f"--task is {asked}: {architecture} is made to {found.value}")
    return task


def pooling_of(
    folder: Path, fields: Fields, spec: ModelSpec, architecture: str, task: Task
) -> PoolingSpec | None:
    """How a model makes vectors; None: it generates. Raises ModelError, naming file and field.

    Args:
        folder: with its files.
        fields: of config.json.
        spec: of the model.
        architecture: as config.json names it.
        task: what is done with it.
    """
    if task is Task.EMBED:
        return _sentence_transformer(folder, fields, spec, architecture)
    if task.pools and architecture.endswith(_LABELLED):
        return _labelled(fields, spec, architecture, task)
    if task is Task.SCORE:
        return _yes_or_no(folder, spec)
    return None


def _labels(folder: Path) -> int:
    """How many labels config.json names; transformers' default is two."""
    fields = read_fields(folder / "config.json")
    if "id2label" in fields:
        return len(fields.fields("id2label").values)
    return fields.integer("num_labels", 2)


# -- sentence-transformers ---------------------------------------------------------------------


def _sentence_transformer(
    folder: Path, model: Fields, spec: ModelSpec, architecture: str
) -> PoolingSpec:
    mode, pools_prompts, layers, normalized = Mode.MEAN, True, list[Dense](), False
    width, token_layers, logarithms = spec.hidden_size, tuple[Dense, ...](), 0
    for kind, own in _modules(folder):
        if kind in ("Transformer", "MLMTransformer"):
            continue
        if kind == "Pooling":
            mode, pools_prompts = _mode(read_fields(folder / own / "config.json"))
        elif kind == "SpladePooling":
            mode, logarithms = Mode.MAX, _logarithms(folder / own / "config.json")
            token_layers = _word_scores(model, spec, architecture)
            width = spec.vocab_size
        elif kind == "Dense":
            layers.append(_dense(folder, own, width))
            width = layers[-1].rows
        elif kind == "Normalize":
            normalized = True
        else:
            raise ModelError(
                f"modules.json: module {kind!r} is not supported (supported: Transformer, Pooling,"
                " SpladePooling, Dense, Normalize)"
            )
        if normalized and kind != "Normalize":
            raise ModelError(f"modules.json: {kind} stands behind Normalize; it must be the last")
    prompts, default = _prompts(folder)
    words, problem = _word_weights(folder, spec)
    return PoolingSpec(
        Task.EMBED,
        mode,
        spec.hidden_size,
        token_layers,
        tuple(layers),
        logarithms,
        normalized,
        pools_prompts,
        _max_tokens(folder),
        prompts,
        default,
        word_layer=words,
        sparse_problem=problem,
    )


def _word_weights(folder: Path, spec: ModelSpec) -> tuple[Dense | None, str]:
    """What weighs tokens as words (BGE-M3), or why it can't be read; no problem: no file says so.

    As the checkpoint is published the file is a pickle, which only `tokenpod convert` reads.
    """
    name = "sparse_linear"
    if not spec.encodes:
        return None, ""
    if (folder / f"{name}.safetensors").is_file():
        return Dense("", f"{name}.safetensors", 1, spec.hidden_size, True, "relu"), ""
    if not (folder / f"{name}.pt").is_file():
        return None, ""
    return None, (
        f"{name}.safetensors is missing beside {name}.pt, a pickle, which is never read; tokenpod"
        " convert makes it"
    )


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Class and folder of each module, in order; none without modules.json."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    entries = _read_list(path)
    found = []
    for entry in entries:
        fields = Fields(entry if isinstance(entry, dict) else {}, path.name)
        own = fields.text("path", "")
        if not re.fullmatch(r"[\w.-]*", own) or own in (".", ".."):
            raise ModelError(f"{path.name}: path {own!r} is no folder beside it")
        found.append((fields.text("type").rpartition(".")[2], own))
    return found


def _read_list(path: Path) -> list[Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path.name}: larger than {MAX_JSON_BYTES >> 20} MiB")
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.name}: can't be read ({error})") from None
    if not isinstance(entries, list) or not 0 < len(entries) <= _MOST:
        raise ModelError(f"{path.name}: expected a list of 1 to {_MOST} modules")
    return entries


def _mode(fields: Fields) -> tuple[Mode, bool]:
    """How tokens are pooled, and whether those of a prompt are."""
    pools_prompts = fields.flag("include_prompt", True)
    if "pooling_mode" in fields:
        return fields.choice("pooling_mode", _MODES), pools_prompts
    on = [
        name for name in fields.values if name.startswith("pooling_mode_") and fields.values[name]
    ]
    modes = [_FLAGS[name] for name in on if name in _FLAGS]
    if len(on) != 1 or len(modes) != 1:
        raise ModelError(
            f"{fields.source}: {', '.join(on) or 'no pooling_mode'} is not supported (supported:"
            f" one of {', '.join(_FLAGS)})"
        )
    return modes[0], pools_prompts


def _logarithms(path: Path) -> int:
    """How often SPLADE's numbers become logarithms."""
    fields = read_fields(path)
    fields.only("pooling_strategy", "max")
    return fields.choice("activation_function", {"relu": 1, "log1p_relu": 2}, "relu")


def _word_scores(fields: Fields, spec: ModelSpec, architecture: str) -> tuple[Dense, ...]:
    """The head of a masked language model: from a token's state to scores of the vocabulary."""
    heads = {
        "Bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
        "MPNet": ("lm_head.dense", "lm_head.layer_norm"),
        "Roberta": ("lm_head.dense", "lm_head.layer_norm"),
        "XLMRoberta": ("lm_head.dense", "lm_head.layer_norm"),
    }
    stem = architecture.removesuffix("ForMaskedLM")
    if stem == architecture or stem not in heads:
        names = ", ".join(f"{each}ForMaskedLM" for each in heads)
        raise ModelError(f"modules.json: SpladePooling of {architecture} (supported: {names})")
    dense, norm = heads[stem]
    at, _, _ = dense.replace(".transform", "").rpartition(".")
    # transformers' own code of RoBERTa and MPNet knows no other activation.
    act = fields.text("hidden_act", "gelu") if stem == "Bert" else "gelu"
    if act not in ACTIVATIONS:
        raise ModelError(f"{fields.source}: hidden_act {act!r} is not supported")
    epsilon = fields.real("layer_norm_eps", 1e-12)
    prefix = {"Bert": "bert", "MPNet": "mpnet"}.get(stem, "roberta")
    hidden = spec.hidden_size
    return (
        Dense(dense, "", hidden, hidden, True, act, norm, epsilon),
        Dense(
            f"{at}.decoder",
            "",
            spec.vocab_size,
            hidden,
            True,
            tied=f"{prefix}.embeddings.word_embeddings.weight",
            other_bias=f"{at}.bias",
        ),
    )


def _dense(folder: Path, own: str, width: int) -> Dense:
    fields = read_fields(folder / own / "config.json")
    columns, rows = fields.integer("in_features"), fields.integer("out_features", most=1 << 20)
    if columns != width:
        raise ModelError(f"{own}/config.json: in_features is {columns}; {width} numbers come in")
    names = {f"torch.nn.modules.activation.{name}": name.lower() for name in _CLASSES}
    names["torch.nn.modules.linear.Identity"] = "identity"
    activation = fields.choice("activation_function", names, "torch.nn.modules.activation.Tanh")
    return Dense("linear", own, rows, columns, fields.flag("bias", True), activation)


_CLASSES = ("Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


def _max_tokens(folder: Path) -> int | None:
    for path in sorted(folder.glob("sentence_*_config.json")):
        return read_fields(path).optional_integer("max_seq_length", None)
    return None


def _prompts(folder: Path) -> tuple[dict[str, str], str]:
    """Texts by their names, and which is the default."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, ""
    fields = read_fields(path)
    prompts: Mapping[str, Any] = fields.fields("prompts").values if "prompts" in fields else {}
    if len(prompts) > _MOST or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path.name}: prompts are at most {_MOST} texts by their names")
    default = fields.text("default_prompt_name", "")
    if default and default not in prompts:
        raise ModelError(f"{path.name}: default_prompt_name {default!r} is none of its prompts")
    return dict(prompts), default


# -- heads of labels ---------------------------------------------------------------------------


def _labelled(fields: Fields, spec: ModelSpec, architecture: str, task: Task) -> PoolingSpec:
    names = fields.fields("id2label").values if "id2label" in fields else {}
    count = len(names) or fields.integer("num_labels", 2, most=_MOST)
    if count > _MOST:
        raise ModelError(f"{fields.source}: id2label has {count} labels; at most {_MOST}")
    labels = tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))
    hidden = spec.hidden_size
    stem = architecture.removesuffix(_LABELLED)
    own: tuple[Dense, ...]
    mode = Mode.CLS
    if stem == "Bert":
        own = (
            Dense("bert.pooler.dense", "", hidden, hidden, True, "tanh"),
            Dense("classifier", "", count, hidden, True),
        )
    elif stem in ("XLMRoberta", "Roberta", "MPNet"):
        own = (
            Dense("classifier.dense", "", hidden, hidden, True, "tanh"),
            Dense("classifier.out_proj", "", count, hidden, True),
        )
    elif stem == "ModernBert":
        mode = fields.choice("classifier_pooling", {"cls": Mode.CLS, "mean": Mode.MEAN}, "cls")
        act, bias = fields.text("classifier_activation", "gelu"), fields.flag("norm_bias", False)
        if act not in ACTIVATIONS:
            raise ModelError(f"{fields.source}: classifier_activation {act!r} is not supported")
        if fields.flag("classifier_bias", False) != bias:
            raise ModelError(f"{fields.source}: classifier_bias and norm_bias differ")
        epsilon = fields.real("norm_eps", 1e-5)
        own = (
            Dense("head.dense", "", hidden, hidden, bias, act, "head.norm", epsilon),
            Dense("classifier", "", count, hidden, True),
        )
    else:
        mode = Mode.LAST_TOKEN
        own = (Dense("score", "", count, hidden, False),)
    several = fields.text("problem_type", "") == "multi_label_classification"
    return PoolingSpec(task, mode, hidden, layers=own, labels=labels, several_labels=several)


#: Qwen3-Reranker's question (Zhang et al. 2025, arXiv 2506.05176): the model answers yes or no.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_TEMPLATE = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def _yes_or_no(folder: Path, spec: ModelSpec) -> PoolingSpec:
    """How much likelier "yes" is than "no": the difference of two rows of the head."""
    words = _token(folder, "yes"), _token(folder, "no")
    head = Dense("", "", 1, spec.hidden_size, False, difference=words)
    return PoolingSpec(
        Task.SCORE,
        Mode.LAST_TOKEN,
        spec.hidden_size,
        layers=(head,),
        before=_BEFORE,
        behind=_BEHIND,
        template=_TEMPLATE,
        instruction=_INSTRUCTION,
    )


def _token(folder: Path, word: str) -> int:
    vocabulary = read_fields(folder / "tokenizer.json").fields("model").fields("vocab").values
    found = vocabulary.get(word)
    if not isinstance(found, int):
        raise ModelError(f"tokenizer.json: --task score needs a token {word!r}, which is not there")
    return found
