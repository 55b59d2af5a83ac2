"""A model folder's tokenizer: text to ids, chats to ids, ids to text.

Neither torch nor, as a rule, transformers is imported: `tokenizer.json` says everything.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tokenpod.service.bounded_files import UnreadableFile, read_bounded
from tokenpod.service.chat_template import ChatTemplate, ChatTemplateError
from tokenpod.service.detokenizer import Detokenizer, decoding_of
from tokenpod.service.text_messages import TextModel

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


#: Bytes of a vocabulary's file (the largest in use have 40 MB), and of any other that is read.
_MOST_VOCABULARY_BYTES = 256 * 2**20
_MOST_CONFIG_BYTES = 16 * 2**20


class TokenizerError(Exception):
    """A folder's tokenizer can't be used; one line that names the file."""


class TokenizerPanic(Exception):
    """The tokenizer's library has panicked on a text; the text says where."""


class Tokenizer:
    """Text to ids and back, exactly as the model was trained.

    `vocab_size` is the number of ids, added tokens included; `special_ids` are those that text
    never shows; `eos_token_ids` end a sequence.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        # Files of trained models carry settings for batches; a server's prompts are whole.
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = eos_token_ids
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.has_chat_template = chat_template is not None
        self._decoding = decoding_of(backend, self.special_ids)
        self._template_source = chat_template
        self._special_tokens = special_tokens or {}

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load from a model's folder.

        `tokenizer.json` is read, or else a SentencePiece `tokenizer.model` is converted; beside
        it `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`,
        `generation_config.json` and `config.json`, where they exist.

        TokenizerError: a file is missing or broken.
        """
        config = _read_object(folder / "tokenizer_config.json")
        special_tokens_map = _read_object(folder / "special_tokens_map.json")
        named = {**_named_tokens(special_tokens_map), **_named_tokens(config)}
        backend = _read_backend(folder)
        _add_configured_tokens(backend, config, named)
        return cls(
            backend,
            eos_token_ids=_read_eos(folder, backend, named),
            chat_template=_read_chat_template(folder, config),
            special_tokens=named,
        )

    @classmethod
    def of_model(cls, model: TextModel) -> Tokenizer:
        """A tokenizer that encodes and renders as the one that made `model` (`text_model`)."""
        return cls(
            Backend.from_buffer(model.tokenizer),
            chat_template=model.chat_template,
            special_tokens=model.special_tokens,
        )

    def text_model(self) -> TextModel:
        """What another process needs to encode and render as this one; takes a while."""
        return TextModel(
            self._backend.to_str().encode(), self._template_source, self._special_tokens
        )

    @property
    def backend(self) -> Backend:
        """The library's tokenizer. Not to be changed."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; special tokens written out in it become their ids.

        TokenizerPanic: the library fails on this text.
        """
        with _panics_named():
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the ids of each text, as `encode` does, and let other threads run meanwhile.

        `encode` keeps the interpreter's lock: quick, but no text that is long may go there.

        TokenizerPanic: as `encode`.
        """
        with _panics_named():
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
            return [encoding.ids for encoding in encodings]

    def render_chat(
        self, messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt that the model's template makes of (role, content) pairs.

        ChatTemplateError: there is no template, it is broken, or it refuses the messages.
        """
        template = self._chat_template
        if isinstance(template, ChatTemplateError):
            raise ChatTemplateError(str(template))
        return template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(
        self, messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of the rendered chat. Templates write special tokens: none is added.

        ChatTemplateError: as `render_chat`.
        """
        prompt = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode_all([prompt], add_special_tokens=False)[0]

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate | ChatTemplateError:
        """Compiled when it is first used: compiling evaluates constants, at whatever cost."""
        return _compiled(self._template_source, self._special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether text never shows this token."""
        return token_id in self.special_ids

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone: a special token's name, '' outside the vocabulary."""
        return self._decoding.token_text(token_id)

    def decode(
        self, ids: Sequence[int], *, prompt_tail: Sequence[int] = (), eager: bool = False
    ) -> str:
        """Return the text that `ids` add after a prompt that ends with `prompt_tail`.

        It is what `detokenizer` streams, by definition. The tail must hold at least one token
        that isn't special, if the prompt has one: it decides whether a leading space is text.
        """
        detokenizer = self.detokenizer(prompt_tail, eager=eager)
        text = "".join(map(detokenizer.push, ids))
        return text + detokenizer.finish()

    def detokenizer(self, prompt_ids: Sequence[int], *, eager: bool = False) -> Detokenizer:
        """Return a detokenizer for the sequence that follows `prompt_ids`.

        The prompt is whole text: a character that it leaves incomplete is never completed.

        It matters only for tokenizers with byte fallback (Llama 2, Mistral, Gemma) whether it is
        `eager`. Such a tokenizer's decoder turns a whole run of byte tokens into U+FFFD if any of
        it is invalid, so its text is certain only when the run ends: a newline, `<0x0A>`, comes
        with the token after it. An eager detokenizer gives every whole character at once, as TGI
        does, and differs from the full decode only in runs with invalid bytes.
        """
        return self._decoding.detokenizer(prompt_ids, eager=eager)


@contextlib.contextmanager
def _panics_named() -> Iterator[None]:
    """A panic of the library becomes a TokenizerPanic: it is a BaseException, and would pass by
    all that answers calls."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise TokenizerPanic(_one_line(error)) from error


def _compiled(
    source: str | None, special_tokens: dict[str, str]
) -> ChatTemplate | ChatTemplateError:
    """Return the template, or why there is none: a model without one still completes text."""
    if source is None:
        return ChatTemplateError("this model has no chat template: send a prompt instead")
    try:
        return ChatTemplate(source, special_tokens)
    except ChatTemplateError as error:
        return error


# --- reading the folder ---------------------------------------------------------------------


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; an empty one if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_bounded(path, _MOST_CONFIG_BYTES))
    except (UnreadableFile, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} can't be read: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def _read_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            with _panics_named():
                return Backend.from_buffer(read_bounded(path, _MOST_VOCABULARY_BYTES))
        except Exception as error:  # the library raises nothing more precise
            raise TokenizerError(f"{path} can't be read: {_one_line(error)}") from error
    if (folder / "tokenizer.model").exists():
        _check_sentencepiece(folder / "tokenizer.model")
        return _convert_sentencepiece(folder)
    raise TokenizerError(f"{folder} has neither tokenizer.json nor tokenizer.model")


def _check_sentencepiece(path: Path) -> None:
    try:
        read_bounded(path, _MOST_VOCABULARY_BYTES)
    except UnreadableFile as error:
        raise TokenizerError(f"{path} can't be read: {error}") from error


def _convert_sentencepiece(folder: Path) -> Backend:
    # Imported here since it takes seconds, and few folders need it.
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # anything, from a missing package to a file of another format
        raise TokenizerError(
            f"{folder / 'tokenizer.model'} can't be converted: {_one_line(error)}"
        ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise TokenizerError(
            f"{folder / 'tokenizer.model'} can't be converted: {type(converted).__name__} has no "
            "tokenizer.json form"
        )
    return backend


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by name (`bos_token`, ...), each a string or an object there."""
    named = {}
    for name in _SPECIAL_TOKEN_NAMES:
        content = _content(config.get(name))
        if content:
            named[name] = content
    return named


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _add_configured_tokens(backend: Backend, config: dict[str, Any], named: dict[str, str]) -> None:
    """Add the tokens that only `tokenizer_config.json` knows, in the order of their ids."""
    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    for token in _configured_tokens(config):
        if token.content not in known or (token.special and not known[token.content]):
            add = backend.add_special_tokens if token.special else backend.add_tokens
            add([token])
            known[token.content] = token.special
    specials = [*named.values(), *map(_content, config.get("additional_special_tokens") or [])]
    backend.add_special_tokens(
        [AddedToken(token, special=True) for token in specials if token and token not in known]
    )


def _configured_tokens(config: dict[str, Any]) -> Iterator[AddedToken]:
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    by_id = {int(key): token for key, token in listed.items() if key.isdigit()}
    for _, token in sorted(by_id.items(), key=lambda item: item[0]):
        if isinstance(token, dict) and (content := _content(token)):
            yield AddedToken(
                content,
                single_word=bool(token.get("single_word", False)),
                lstrip=bool(token.get("lstrip", False)),
                rstrip=bool(token.get("rstrip", False)),
                normalized=bool(token.get("normalized", False)),
                special=bool(token.get("special", False)),
            )


def _read_eos(folder: Path, backend: Backend, named: dict[str, str]) -> frozenset[int]:
    """Return the ids that end a sequence, from the first file that names any."""
    generation = _eos_ids(_read_object(folder / "generation_config.json"), folder)
    if generation:
        return generation
    if "eos_token" in named:
        token_id = backend.token_to_id(named["eos_token"])
        if token_id is not None:
            return frozenset([token_id])
    config = _read_object(folder / "config.json")
    text_config = config.get("text_config")
    return _eos_ids(config, folder) or _eos_ids(
        text_config if isinstance(text_config, dict) else {}, folder
    )


def _eos_ids(config: dict[str, Any], folder: Path) -> frozenset[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise TokenizerError(f"{folder}: eos_token_id is {value!r}, not a token id or a list")
    return frozenset(ids)


def _read_chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the template's source: the file, or the configuration's one or its 'default'."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_bounded(path, _MOST_CONFIG_BYTES).decode()
        except (UnreadableFile, ValueError) as error:
            raise TokenizerError(f"{path} can't be read: {_one_line(error)}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, dict))
        template = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    return template if isinstance(template, str) else None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
