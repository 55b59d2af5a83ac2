"""Which tokenizers may run on the event loop."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from tokenpod.service.text.tokenizers.inline_cost import is_bounded

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def with_steps(
    normalizer: Normalizer | None = None, pre_tokenizer: PreTokenizer | None = None
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def split(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def test_every_kind_in_use_is_bounded(backends: dict[str, Tokenizer]) -> None:
    assert {name for name, backend in backends.items() if not is_bounded(backend)} == set()


@pytest.mark.parametrize("pattern", [LLAMA_3, GPT_4O, " {2,}", r"\n"])
def test_patterns_of_known_models_are_bounded(pattern: str) -> None:
    assert is_bounded(with_steps(pre_tokenizer=split(pattern)))


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|aa)*b", "a*a*b", "a*a*a*", "(a{1,9}){1,9}b"])
def test_patterns_that_may_backtrack_for_long_are_not(pattern: str) -> None:
    assert not is_bounded(with_steps(pre_tokenizer=split(pattern)))


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Replace("a", "b" * 1000),
        normalizers.Replace("", "b"),
        normalizers.Replace(Regex("(a+)+b"), "b"),
        normalizers.Prepend("a" * 10_000),
        normalizers.Sequence([normalizers.Replace("a", "aaaaaaaa")] * 3),
    ],
)
def test_normalisers_that_lengthen_a_text_without_bound_are_not(normalizer: Normalizer) -> None:
    assert not is_bounded(with_steps(normalizer=normalizer))


def test_a_template_of_many_tokens_is_not() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(["<s>"] * 1000) + " $A", special_tokens=[("<s>", 1)]
    )
    assert not is_bounded(tokenizer)
