"""From the corpus to what training reads: the tokenizer, token streams, the configuration files."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .corpus import shared_lines, split, standard_library
from .network import BEGIN_ID, END_ID, PAD_ID, Shape

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"

# Pieces that merges never cross: runs of newlines and of spaces stay whole and apart from what
# follows, so that a prompt may end anywhere in an indentation; a word keeps one space or sign
# before it; digits stand alone.
PIECES = r"\n+| {2,}|(?: |[^\s\p{L}\p{N}_])?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]+|\s"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '# ' + message['role'] + ': ' }}"
    "{{ message['content'].strip().replace('\\n', '\\n# ') + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '# assistant:\\n' }}{% endif %}"
)


def make_tokenizer(sources: list[bytes], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer that puts BEGIN before what it encodes and loses no byte."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator((source.decode() for source in sources), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, BEGIN_ID)],
    )
    return tokenizer


def encode_all(tokenizer: Any, modules: dict[str, bytes]) -> np.ndarray:
    """All modules in one uint16 stream: BEGIN, tokens, END, BEGIN, ..."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([source.decode() for source in modules.values()]):
        ids += [*encoding.ids, END_ID]
    return np.array(ids, dtype=np.uint16)


def statement_starts(tokenizer: Any, stream: np.ndarray) -> np.ndarray:
    """Positions where a definition or an import begins a line: where a prompt would begin too."""
    vocabulary = tokenizer.get_vocab()
    newline = [i for text, i in vocabulary.items() if set(text) == {"Ċ"}]
    openers = [vocabulary[w] for w in ("def", "class", "import", "from") if w in vocabulary]
    return np.flatnonzero(np.isin(stream[:-1], newline) & np.isin(stream[1:], openers)) + 1


def prepare(work: Path, model_dir: Path) -> None:
    train, held_out = split(standard_library())
    tokenizer = make_tokenizer(list(train.values()), Shape.vocab_size)
    for name, source in (train | held_out).items():
        ids = tokenizer.encode(source.decode()).ids
        if tokenizer.decode(ids).encode() != source:
            raise SystemExit(f"the tokenizer does not give back the bytes of {name}")
    stream = encode_all(tokenizer, train)
    unseen = encode_all(tokenizer, held_out)
    shares = shared_lines(train, held_out)
    work.mkdir(parents=True, exist_ok=True)
    model_dir.mkdir(parents=True, exist_ok=True)
    np.save(work / "train.npy", stream)
    np.save(work / "held_out.npy", unseen)
    np.save(work / "starts.npy", statement_starts(tokenizer, stream))
    facts = {
        "python": platform.python_version(),
        "train": {"modules": len(train), "bytes": size(train), "tokens": len(stream)},
        "held_out": {"modules": len(held_out), "bytes": size(held_out), "tokens": len(unseen)},
        "near_duplicates": {name: round(share, 2) for name, share in shares.items() if share > 0.2},
    }
    (work / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
    tokenizer.save(str(model_dir / "tokenizer.json"))
    write_configuration(model_dir)
    print(json.dumps(facts, indent=2))


def size(modules: dict[str, bytes]) -> int:
    return sum(map(len, modules.values()))


def write_configuration(model_dir: Path) -> None:
    """The JSON files beside tokenizer and weights, in the form that transformers reads."""
    ids = {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        **asdict(Shape()),
        **ids,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": Shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (
        ("config.json", config),
        ("generation_config.json", ids),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (model_dir / name).write_text(json.dumps(content, indent=2) + "\n")
