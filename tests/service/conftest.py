# ruff: noqa: RUF001 - text of many scripts is the point
"""Tokenizers of each kind, trained here on a few lines of many scripts."""

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Größe, naïve façade, ça va? Où est l'hôtel? ¿Qué tal, señor?",
    "你好，世界。我们今天去北京。日本語のテキストもあります。안녕하세요 세계",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया",
    "😀😃 👩‍👩‍👧‍👦 🇩🇪🏳️‍🌈 👍🏽 emoji — “quotes” … and\ttabs\n\nnew lines",
    "def f(x):\n    return {'a': x, \"b\": [1, 2, 3]}  # comment",
] * 3
SPECIALS = ["<s>", "</s>", "<|user|>"]


def byte_level() -> Tokenizer:
    """GPT-2's and Llama 3's kind: bytes as characters, so any token can split one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Not special: shown as they are, whether or not the byte alphabet has their characters.
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("Ġword"), AddedToken("Ġ 字")])
    return tokenizer


def byte_fallback(strip: bool = True) -> Tokenizer:
    """Llama 2's and Mistral's kind, as their tokenizer.json has it (Gemma's without the strip)."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=520,
        special_tokens=["<unk>", *SPECIALS, *bytes_],
        limit_alphabet=60,
        show_progress=False,
    )
    # These are bytes here: of characters that are equally rare the trainer keeps any.
    rare = str.maketrans("", "", "好😀")
    tokenizer.train_from_iterator([line.translate(rare) for line in CORPUS], trainer)
    # The trainer makes byte tokens special; in a model's file they are plain vocabulary.
    plain = Tokenizer(
        models.BPE(
            vocab=tokenizer.get_vocab(),
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    plain.normalizer = tokenizer.normalizer
    plain.add_special_tokens(["<unk>", *SPECIALS])
    plain.add_tokens([AddedToken("▁<tool▁call>"), AddedToken("  two spaces")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    plain.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return plain


def metaspace(prepend_scheme: str = "always") -> Tokenizer:
    """T5's and XLM's kind: pieces with a mark for a space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=260, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("▁▁tool"), AddedToken("▁")])
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind, which nothing here recognises."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIALS], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def end_of_word() -> Tokenizer:
    """The first GPT's kind: BPE with a mark at the end of a word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", *SPECIALS],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_unstripped": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "metaspace_never": lambda: metaspace("never"),
    "word_piece": word_piece,
    "end_of_word": end_of_word,
}


@pytest.fixture(scope="session")
def backends() -> dict[str, Tokenizer]:
    """One trained tokenizer of each kind, by name. Tests don't change them."""
    return {name: make() for name, make in KINDS.items()}


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """Lines of many scripts."""
    return CORPUS
