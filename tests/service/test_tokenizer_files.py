"""Tokenizers of every format that models are published in, and whether they are the model's."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from support.examples import examples
from support.texts.byte_runs import known
from support.texts.chat_templates import turns
from tokenpod.service.text.tokenizers.conversion import converted
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer, TokenizerError

#: Text of any script, with what breaks detokenisers more often than chance would have it.
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
        st.sampled_from(["the fox", "  ", "\n", "👩‍👩‍👧‍👦", "好", "▁", "é", "नि"]),
        st.sampled_from(["<0x0A>", "</s>", "\ufffd"]),
    ),
    max_size=6,
).map("".join)


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def tiktoken_file(path: Path, backend: Backend) -> None:
    """The file that tiktoken would have of a byte-level vocabulary: all bytes, then merges."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    pairs = json.loads(backend.to_str())["model"]["merges"]
    merges = [bytes(byte_of[char] for char in a + b) for a, b in pairs]
    tokens = list(dict.fromkeys([*(bytes([i]) for i in range(256)), *merges]))
    lines = [b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(tokens)]
    path.write_bytes(b"".join(lines))


def sentencepiece_folder(
    folder: Path, corpus: list[str], kind: str, config: dict[str, object]
) -> Path:
    import sentencepiece

    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus * 5),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=460,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write(folder / "tokenizer_config.json", names | config)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory, backends: dict[str, Backend], corpus) -> dict[str, Path]:
    """One folder per format, without tokenizer.json, by kind."""
    root = tmp_path_factory.mktemp("formats")
    made = {
        "bpe": sentencepiece_folder(
            root / "bpe", corpus, "bpe", {"tokenizer_class": "LlamaTokenizer"}
        ),
        "unigram": sentencepiece_folder(
            root / "unigram", corpus, "unigram", {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}
        ),
    }
    write(made["bpe"] / "config.json", {"model_type": "llama"})
    write(made["unigram"] / "config.json", {"model_type": "t5"})
    made["tiktoken"] = root / "tiktoken"
    made["tiktoken"].mkdir()
    tiktoken_file(made["tiktoken"] / "tokenizer.model", backends["byte_level"])
    made["merges"] = root / "merges"
    made["merges"].mkdir()
    backends["byte_level"].model.save(str(made["merges"]))
    names = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>"}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, **names}
    write(made["merges"] / "tokenizer_config.json", config)
    write(made["merges"] / "config.json", {"model_type": "opt", "vocab_size": 424})
    made["words"] = root / "words"
    made["words"].mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es", "##f", "好", ","]
    (made["words"] / "vocab.txt").write_text("\n".join(words))
    write(made["words"] / "config.json", {"model_type": "bert"})
    return made


@pytest.fixture(scope="session")
def formats(folders) -> dict[str, Backend]:
    return {kind: converted(folder) for kind, folder in folders.items()}


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer([])
    return [*map(detokenizer.push, ids), detokenizer.finish()]


KINDS = ["bpe", "unigram", "tiktoken", "merges", "words"]
OF_PACKAGE = ["byte_level", "byte_fallback", "byte_fallback_unstripped", "metaspace", "word_piece"]


@pytest.mark.parametrize("kind", [*KINDS, *OF_PACKAGE])
def test_pieces_of_any_cut_of_any_text_join_to_its_whole_decode(formats, backends, kind):
    """And show no replacement character that the whole text has not."""
    backend = {**backends, **formats}[kind]
    tokenizer = Tokenizer(Backend.from_str(backend.to_str()))

    @settings(max_examples=examples(150), deadline=None, derandomize=True, database=None)
    @given(text=TEXTS, cut=st.tuples(st.integers(0, 40), st.integers(0, 40)))
    def hold(text, cut):
        ids = tokenizer.encode(text)[cut[0] :][: cut[1]]
        pieces = streamed(tokenizer, ids)
        whole = backend.decode(known(backend, ids), skip_special_tokens=True)
        assert "".join(pieces) == whole
        assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")

    hold()


@pytest.mark.parametrize("kind", ["bpe", "tiktoken", "merges", "byte_level", "byte_fallback"])
def test_text_in_any_language_comes_back(formats, backends, kind):
    backend = {**backends, **formats}[kind]
    tokenizer = Tokenizer(Backend.from_str(backend.to_str()))
    specials = {backend.id_to_token(i) for i in tokenizer.special_ids}

    @settings(max_examples=examples(150), deadline=None, derandomize=True, database=None)
    @given(text=TEXTS)
    def hold(text):
        if any(token in text for token in specials):
            return
        if kind in ("bpe", "byte_fallback"):
            # The mark of a space is one, names of bytes are bytes, and a first space is dropped.
            text = re.sub("<0x..>", "", text.replace("▁", " ")).lstrip(" ")
        assert "".join(streamed(tokenizer, tokenizer.encode(text))) == text

    hold()


def test_tiktoken_gives_each_token_its_rank(folders, formats, backends):
    lines = (folders["tiktoken"] / "tokenizer.model").read_bytes().splitlines()
    assert formats["tiktoken"].get_vocab_size() == len(lines)
    tokenizer = Tokenizer(formats["tiktoken"])
    rank = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines}
    ids = tokenizer.encode(" 好 again")
    by_id = {i: token for token, i in rank.items()}
    assert b"".join(by_id[i] for i in ids).decode() == " 好 again"
    assert rank[b" again"] in ids


@pytest.mark.pod
def test_tokens_beyond_a_tiktoken_vocabulary_keep_their_ids(folders, tmp_path):
    folder = shutil.copytree(folders["tiktoken"], tmp_path / "model")
    size = converted(folder).get_vocab_size()
    listed = {str(size + 3): {"content": "<|end|>", "special": True}}
    write(folder / "tokenizer_config.json", {"added_tokens_decoder": listed})
    tokenizer = Tokenizer.load(folder)  # in a process, as a server does
    assert tokenizer.encode("<|end|>") == [size + 3]
    assert tokenizer.vocab_size == size + 4


@pytest.mark.parametrize(
    ("name", "content", "config", "message"),
    [
        ("tokenizer.model", b"YQ== 0\nYg== zero\n", {}, "line 2 is no token"),
        ("tokenizer.model", b"YQ== 0\nYg== 7\n", {}, "have not the ranks 0 to 1"),
        ("tiktoken.model", b"YQ== 0\n\xff", {}, "line 2 is no token"),
        ("tokenizer.model", b"not a model", {"tokenizer_class": "LlamaTokenizer"}, "converted"),
        (
            "tiktoken.model",
            b"YQ== 0\n",
            {"added_tokens_decoder": {"99999999999": {"content": "x"}}},
            "token id 99999999999: at most 65536",
        ),
        (
            "tiktoken.model",
            b"YQ== 0\n",
            {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}},
            "is code that came with the model, which is not run",
        ),
        ("vocab.json", b"[1", {"tokenizer_class": "GPT2Tokenizer"}, "can't be converted"),
    ],
)
def test_a_vocabulary_that_can_not_be_converted(tmp_path, name, content, config, message):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('it was run')")
    write(tmp_path / "tokenizer_config.json", config)
    with pytest.raises(TokenizerError, match=message) as caught:
        converted(tmp_path)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


# --- the model's vocabulary


@pytest.fixture
def folder(tmp_path, backends) -> Path:
    """A byte-level tokenizer of 423 tokens, six of which are added."""
    backends["byte_level"].save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("size", [100, 419, 900, 128_000])
def test_a_tokenizer_of_another_model_is_refused(folder, size):
    write(folder / "config.json", {"vocab_size": size})
    with pytest.raises(TokenizerError, match=rf"423 tokens, .* vocabulary {size}: they don't"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("size", [423, 448, 512, 846])
def test_an_embedding_may_be_padded(folder, size):
    write(folder / "config.json", {"vocab_size": size})
    assert Tokenizer.load(folder).vocab_size == 423


def test_a_part_about_text_has_the_vocabulary(folder):
    write(folder / "config.json", {"text_config": {"vocab_size": 100}})
    with pytest.raises(TokenizerError, match="vocabulary 100"):
        Tokenizer.load(folder)


def test_added_tokens_beyond_the_embedding_are_plain_text(folder):
    """Gemma 3 1B has one for pictures; many that were tuned from Llama 2 have one for padding."""
    write(folder / "config.json", {"vocab_size": 422})
    write(folder / "tokenizer_config.json", {"pad_token": "[PAD]"})
    whole = Backend.from_file(str(folder / "tokenizer.json"))
    last = whole.id_to_token(422)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == 422
    for text in (last, "[PAD]", "a fox"):
        ids = tokenizer.encode(text)
        assert max(ids) < 422
        assert "".join(streamed(tokenizer, ids)) == text


# --- chat templates


@pytest.fixture
def templates(folder) -> Path:
    """Named in the configuration, and in files."""
    named = [{"name": "default", "template": "config"}, {"name": "rag", "template": "config rag"}]
    write(folder / "tokenizer_config.json", {"chat_template": named})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("file tools")
    return folder


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [(None, "config"), ("default", "config"), ("rag", "config rag"), ("tool_use", "file tools")],
)
def test_a_template_is_chosen_by_its_name(templates, wanted, expected):
    assert Tokenizer.load(templates, wanted).render_chat(turns()) == expected


def test_a_template_may_be_a_file_of_the_operators(templates, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("own {{ messages[0].content }}")
    assert Tokenizer.load(templates, str(own)).render_chat(turns(("user", "x"))) == "own x"


def test_a_template_that_is_not_there_is_named_with_those_that_are(templates):
    with pytest.raises(TokenizerError, match=r"chat_template is no: .* default, rag, tool_use\)"):
        Tokenizer.load(templates, "no")


def test_files_come_before_the_configuration(templates):
    (templates / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(templates).render_chat(turns()) == "file"
    assert Tokenizer.load(templates, "rag").render_chat(turns()) == "config rag"


def test_a_processors_template_is_read(folder):
    write(folder / "chat_template.json", {"chat_template": "of the processor"})
    assert Tokenizer.load(folder).render_chat(turns()) == "of the processor"
