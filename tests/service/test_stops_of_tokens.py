"""A stop sequence ends a sequence at the token that completes it, whatever the tokenizer's kind."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as Backend

from tokenpod.core.outputs import FinishCode
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.service.calls.call import ShardRequest
from tokenpod.service.calls.sample import Sample
from tokenpod.service.serving.routed import RoutedSequence
from tokenpod.service.text.reader import StopMatcher, TextReader
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer

#: Of Llama 2, Mistral and Gemma, and of GPT-2 and Llama 3.
KINDS = ["byte_fallback", "byte_fallback_unstripped", "byte_level"]
#: The tokenizers under test have no merge, or no token, for some of these characters.
ALPHABET = "ab \n\t.é字😀好ж"


def streamed(
    tokenizer: Tokenizer, ids: list[int], *stops: str, min_new_tokens: int = 0
) -> tuple[int, str | None, str]:
    """How many tokens a stream has taken, the stop that ended it, and its text."""
    sample = Sample(
        index=0,
        sequence_id=1,
        reader=TextReader(tokenizer.detokenizer([]), StopMatcher(stops, include=True)),
        min_new_tokens=min_new_tokens,
        streamed=True,
    )
    for at, token_id in enumerate(ids):
        last = FinishCode.LENGTH if at == len(ids) - 1 else FinishCode.RUNNING
        sample.push(token_id, 0.0, last, None, at)
        if sample.ending is not None:
            return at + 1, sample.ending.stop_sequence, sample.text
    raise AssertionError("LENGTH ends it")


def routed(tokenizer: Tokenizer, ids: list[int], *stops: str) -> tuple[int, str, list[str]]:
    """The same of a router's sequence, and each token's text; it ends with a stop."""
    asked = ShardRequest(
        **{"id": 3, "inputs": "x", "truncate": 0, "add_special_tokens": True},
        **{"prefill_logprobs": False, "top_n_tokens": 0, "max_new_tokens": 500},
        **{"stop_sequences": stops, "ignore_eos": False, "do_sample": False, "temperature": 0.0},
        **{"top_k": 0, "top_p": 0.0, "typical_p": 0.0, "repetition_penalty": 0.0},
        **{"frequency_penalty": 0.0, "seed": 0, "watermark": False},
        **{"constraint": None, "adapter_id": None, "chunk_len": None},
    )
    request = Request([7], [5, 6], SamplingParams(), StoppingParams(500))
    sequence, texts = RoutedSequence(asked, request, tokenizer), list[str]()
    for at, token_id in enumerate(ids):
        said = sequence.begun(None)
        sequence.push(token_id, 0.0, FinishCode.RUNNING, None, said)
        texts += said.tokens.texts
        if said.text is not None:
            return at + 1, said.text.text, texts
    raise AssertionError(f"no stop was found in {texts}")


def ids_of(backend: Backend, text: str) -> list[int]:
    return list(backend.encode(text, add_special_tokens=False).ids)


def byte_ids(backend: Backend, text: str) -> list[int]:
    """The byte tokens of a text."""
    return [backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


@pytest.mark.parametrize("stop", ["\n", "é", "😀"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_of_byte_tokens_ends_at_the_last_of_them(
    backends: dict[str, Backend], kind: str, stop: str
) -> None:
    backend = backends[kind]
    tokenizer = Tokenizer(backend)
    ids = ids_of(backend, f"ab{stop}")
    # As many byte tokens behind it as a model may go on with.
    ids_on = [*ids, *ids_of(backend, "\n" * 40)]
    assert streamed(tokenizer, ids_on, stop)[:2] == (len(ids), stop)
    taken, text, texts = routed(tokenizer, ids_on, stop)
    assert taken == len(ids)
    assert text == "".join(texts)
    assert text.lstrip() == f"ab{stop}"


def test_a_newline_as_a_byte_token_has_its_text_at_once(backends: dict[str, Backend]) -> None:
    backend = backends["byte_fallback"]
    newline = backend.token_to_id("<0x0A>")
    a = backend.token_to_id("a")
    assert routed(Tokenizer(backend), [a, newline, newline, a], "\n") == (2, "a\n", ["a", "\n"])


def test_a_stop_that_begins_within_a_run_of_bytes_ends_outside(
    backends: dict[str, Backend],
) -> None:
    backend = backends["byte_fallback"]
    tokenizer = Tokenizer(backend)
    ids = [*byte_ids(backend, "é\n"), backend.token_to_id("b"), *byte_ids(backend, "\n")]
    assert streamed(tokenizer, ids, "\nb") == (4, "\nb", "é\nb")
    assert routed(tokenizer, ids, "\nb")[:2] == (4, "é\nb")


def test_a_stop_within_a_run_that_is_no_utf_8_ends_where_it_is_complete(
    backends: dict[str, Backend],
) -> None:
    backend = backends["byte_fallback"]
    tokenizer = Tokenizer(backend)
    odd = backend.token_to_id("<0xFF>")
    ids = [odd, *byte_ids(backend, "\n"), odd, odd]
    assert streamed(tokenizer, ids, "\n") == (2, "\n", "\ufffd\n")
    assert routed(tokenizer, ids, "\n")[:2] == (2, "\ufffd\n")


@pytest.mark.parametrize("kind", KINDS)
def test_an_incomplete_character_at_the_end_is_part_of_no_stop(
    backends: dict[str, Backend], kind: str
) -> None:
    backend = backends[kind]
    ids = ids_of(backend, "a😀")[:-1]
    taken, stop, text = streamed(Tokenizer(backend), ids, "😀")
    assert (taken, stop) == (len(ids), None)
    assert text.lstrip().rstrip("\ufffd") == "a"
    assert text.endswith("\ufffd")


def test_a_stop_before_the_least_length_does_not_count(backends: dict[str, Backend]) -> None:
    backend = backends["byte_fallback"]
    tokenizer = Tokenizer(backend)
    ids = byte_ids(backend, "\n\n\n\n")
    assert streamed(tokenizer, ids, "\n", min_new_tokens=3) == (3, "\n", "\n\n\n")


@pytest.mark.parametrize("kind", KINDS)
def test_any_stop_ends_at_the_first_token_whose_text_has_it(
    backends: dict[str, Backend], kind: str
) -> None:
    backend = backends[kind]
    tokenizer = Tokenizer(backend)
    rng = random.Random(kind)
    for _ in range(300):
        text = "".join(rng.choices(ALPHABET, k=rng.randrange(3, 16)))
        ids = ids_of(backend, text)
        decoded = backend.decode(ids)
        begin = rng.randrange(len(decoded))
        stop = decoded[begin : begin + rng.randrange(1, 4)]
        first = next(n for n in range(len(ids) + 1) if stop in backend.decode(ids[:n]))
        assert streamed(tokenizer, ids, stop)[:2] == (first, stop), (text, stop)
