import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from support.texts.byte_runs import ids_of_bytes, known
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer

SEQUENCES = 1200
RECOGNISED = [
    "byte_level",
    "byte_fallback",
    "byte_fallback_unstripped",
    "metaspace",
    "metaspace_never",
]
WINDOWED = ["word_piece", "end_of_word"]


def random_ids(rng: random.Random, tokenizer: Tokenizer, backend: Backend) -> list[int]:
    """Ids as no model would give them: bytes and incomplete characters in runs, special tokens
    between them, ids beyond the vocabulary; and some as a model would."""
    size = tokenizer.vocab_size
    fragments = [
        token_id
        for token_id in range(size)
        if (token := backend.id_to_token(token_id)).startswith("<0x") or len(token) == 1
    ]
    ids: list[int] = []
    for _ in range(rng.randrange(1, 6)):
        kind = rng.randrange(4)
        if kind == 0:
            ids += rng.choices(range(size + 5), k=rng.randrange(8))
        elif kind == 1:
            ids += rng.choices(fragments, k=rng.randrange(9))
        elif kind == 2:
            text = "".join(rng.choices("好😀éж  \n.a字👩‍👧z", k=rng.randrange(1, 6)))
            ids += backend.encode(text, add_special_tokens=False).ids
        else:
            ids += rng.choices(sorted(tokenizer.special_ids), k=rng.randrange(3))
    return ids


def streamed(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer(prompt)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    return "".join(pieces) + detokenizer.finish()


@pytest.mark.parametrize("kind", [*RECOGNISED, *WINDOWED])
def test_streamed_text_is_the_full_decode_for_random_ids(backends, kind):
    backend = backends[kind]
    tokenizer = Tokenizer(backend)
    rng = random.Random(kind)
    for _ in range(SEQUENCES):
        ids = random_ids(rng, tokenizer, backend)
        text = streamed(tokenizer, [], ids)
        assert text == backend.decode(known(backend, ids), skip_special_tokens=True), ids
        text.encode()


@pytest.mark.parametrize("kind", [*RECOGNISED, *WINDOWED])
def test_special_tokens_are_text_where_they_are_to_be_shown(backends, kind):
    backend = backends[kind]
    tokenizer = Tokenizer(backend)
    rng = random.Random(kind)
    for _ in range(SEQUENCES // 8):
        words = backend.encode(rng.choice(["fox jumps", "the", "and again"])).ids
        shown = rng.choice(sorted(tokenizer.special_ids))
        at = rng.randrange(1, len(words) + 1)
        ids = [*words[:at], shown, *words[at:]]
        detokenizer = tokenizer.detokenizer([], skip_special=False)
        text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
        assert text == backend.decode(ids, skip_special_tokens=False), ids
        assert backend.id_to_token(shown) in text
        assert backend.id_to_token(shown) not in streamed(tokenizer, [], ids)


@pytest.mark.parametrize("kind", [*RECOGNISED, *WINDOWED])
def test_streamed_text_continues_the_prompts(backends, kind):
    backend = backends[kind]
    tokenizer = Tokenizer(backend)
    rng = random.Random(kind)
    for _ in range(SEQUENCES // 4):
        # Whole characters: nothing of the prompt's text depends on what follows.
        prompt = backend.encode(rng.choice(["fox jumps", "the", "and again"])).ids
        ids = random_ids(rng, tokenizer, backend)
        whole = backend.decode(known(backend, prompt + ids))
        before = backend.decode(prompt)
        assert before + streamed(tokenizer, prompt, ids) == whole, ids


@pytest.mark.parametrize("kind", RECOGNISED)
def test_only_whole_characters_are_pushed(backends, kind):
    backend = backends[kind]
    tokenizer = Tokenizer(backend)
    text = "fox 👩‍👩‍👧‍👦好ж" + "é"
    ids = backend.encode(text).ids
    detokenizer = tokenizer.detokenizer([])
    pieces = [detokenizer.push(token_id) for token_id in ids]
    if not kind.startswith("metaspace"):
        assert "".join(pieces) + detokenizer.finish() == backend.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_byte_token_that_completes_a_character_brings_it(backends):
    backend = backends["byte_fallback"]
    tokenizer = Tokenizer(backend)
    ids = ids_of_bytes(backend, "\n好\n".encode() + b"\xff\n\xe5\xa5")
    detokenizer = tokenizer.detokenizer([])
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert pieces == ["\n", "", "", "好", "\n", "\ufffd", "\n", "", ""]
    assert detokenizer.push(backend.token_to_id("a")) == "\ufffd\ufffda"
    assert detokenizer.finish() == ""


def test_an_incomplete_character_at_the_end_becomes_a_replacement(backends):
    backend = backends["byte_level"]
    tokenizer = Tokenizer(backend)
    first, *_ = backend.encode("€").ids
    detokenizer = tokenizer.detokenizer([])
    assert detokenizer.push(first) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_special_token_does_not_split_a_character(backends):
    for kind in ("byte_level", "byte_fallback"):
        backend = backends[kind]
        tokenizer = Tokenizer(backend)
        special = backend.token_to_id("</s>")
        ids = backend.encode("🏳", add_special_tokens=False).ids
        between = [token_id for one in ids for token_id in (one, special)]
        assert len(ids) > 1
        assert streamed(tokenizer, [], between) == backend.decode(ids)


def test_a_leading_space_is_text_only_after_a_prompt_with_text(backends):
    backend = backends["byte_fallback"]
    tokenizer = Tokenizer(backend)
    mark = backend.token_to_id("▁")
    letter = backend.token_to_id("a")
    bos = backend.token_to_id("<s>")
    assert streamed(tokenizer, [], [mark, letter]) == "a"
    assert streamed(tokenizer, [bos], [mark, letter]) == "a"
    assert streamed(tokenizer, [letter, bos], [mark, letter]) == " a"


def test_ids_outside_the_vocabulary_are_nothing(backends):
    for backend in backends.values():
        tokenizer = Tokenizer(backend)
        assert streamed(tokenizer, [], [10**6, -1]) == ""
        assert tokenizer.token_text(10**6) == ""
        assert tokenizer.token_text(-1) == ""


@pytest.mark.parametrize("kind", [*RECOGNISED, *WINDOWED])
def test_one_token_alone_has_the_decoders_text_or_its_name(backends, kind):
    backend = backends[kind]
    tokenizer = Tokenizer(backend)
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_text(token_id)
        if token_id in tokenizer.special_ids:
            assert text == backend.id_to_token(token_id)
        elif kind not in ("byte_level", "metaspace_never", *WINDOWED):
            # The space that the decoder strips from a text's beginning is this token's own.
            alone = backend.decode([token_id])
            assert text.lstrip(" ") == alone.lstrip(" ")
        else:
            assert text == backend.decode([token_id])


def test_a_decoder_that_always_ends_in_replacements_is_not_held_for_ever():
    backend = Backend(models.WordLevel({"\ufffd": 0, "a": 1}, unk_token="a"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = Tokenizer(backend)
    detokenizer = tokenizer.detokenizer([])
    pieces = [detokenizer.push(0) for _ in range(100)]
    assert sum(bool(piece) for piece in pieces) >= 5
    assert "".join(pieces) + detokenizer.finish() == backend.decode([0] * 100)
