"""A model folder's tokenizer: text to ids, chats to ids, ids to text.

Neither torch nor, as a rule, transformers is imported: `tokenizer.json` says everything.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tokenpod.service.calls.chats import ChatPrompt
from tokenpod.service.text.tokenizers.chat_template import ChatTemplate, ChatTemplateError
from tokenpod.service.text.tokenizers.conversion import converted_apart
from tokenpod.service.text.tokenizers.decoding import Decoding, Detokenizer, Spaced
from tokenpod.service.text.tokenizers.detokenizer import decoding_of
from tokenpod.service.text.tokenizers.files import (
    MOST_VOCABULARY_BYTES,
    TokenizerError,
    one_line,
    read_bounded,
    read_object,
)
from tokenpod.service.text.tokenizers.template_files import chosen_template, read_templates

__all__ = ["Tokenizer", "TokenizerError", "TokenizerPanic"]


class TextModel(msgspec.Struct, frozen=True, array_like=True):
    """What a worker tokenises and renders with; it reads no file of the model's folder.

    Args:
        tokenizer: a whole `tokenizer.json`.
        chat_template: source; None: the model has none.
        special_tokens: the template's variables (`bos_token`, ...).
    """

    tokenizer: bytes
    chat_template: str | None
    special_tokens: dict[str, str]

    @classmethod
    def read(cls, descriptor: int) -> TextModel:
        """That of a file that holds one."""
        # Mapped, not read: all processes share the descriptor, and with it the place in the file.
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            return msgspec.msgpack.decode(view, type=cls)


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
        self._decoding = decoding_of(backend, self.special_ids)
        self._decodings: dict[frozenset[str], Decoding] = {frozenset(): self._decoding}
        self._template_source = chat_template
        self._special_tokens = special_tokens or {}

    @classmethod
    def load(cls, folder: Path, chat_template: str | None = None) -> Tokenizer:
        """Load from a model's folder.

        `tokenizer.json` is read, or else a vocabulary of another format is converted (see
        conversion.py); beside it `tokenizer_config.json`, `special_tokens_map.json`, chat templates
        (see template_files.py), `generation_config.json` and `config.json`, where they exist.

        `chat_template` is the name of one of the model's templates, or a file; None: the default.

        TokenizerError: a file is missing or broken, or it is another model's.
        """
        files = read_folder(folder, chat_template)
        return cls(
            files.backend,
            eos_token_ids=files.eos_token_ids,
            chat_template=files.chat_template,
            special_tokens=files.special_tokens,
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

    def check(self, size: int) -> None:
        """Raise TokenizerError if this is not the tokenizer of a model with so many rows."""
        check_vocabulary(self.vocab_size, self.vocab_size, size, "the model's folder")

    @property
    def backend(self) -> Backend:
        """The library's tokenizer. Not to be changed."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; special tokens written out in it become their ids.

        TokenizerPanic: the library fails on this text.
        """
        with panics_named():
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the ids of each text, as `encode` does, and let other threads run meanwhile.

        `encode` keeps the interpreter's lock: quick, but no text that is long may go there.

        TokenizerPanic: as `encode`.
        """
        with panics_named():
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
            return [encoding.ids for encoding in encodings]

    def encode_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return ids as `encode_all` does, and where each begins and ends in `text`, in turn.

        Offsets are in code points. TokenizerPanic: as `encode`.
        """
        with panics_named():
            (found,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
            return found.ids, [end for pair in found.offsets for end in pair]

    def render_chat(self, chat: ChatPrompt) -> str:
        """Return the prompt that the model's template makes of a conversation.

        ChatTemplateError: there is no template, it is broken, or it refuses the conversation.
        """
        template = self._chat_template
        if isinstance(template, ChatTemplateError):
            raise ChatTemplateError(str(template))
        return template.render(chat)

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate | ChatTemplateError:
        """Compiled when it is first used: compiling evaluates constants, at whatever cost."""
        return _compiled(self._template_source, self._special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone: a special token's name, '' outside the vocabulary."""
        return self._decoding.token_text(token_id)

    @property
    def tells_bytes(self) -> bool:
        """Whether each token adds bytes of its own to a text, as constraints need it."""
        return self._decoding.token_bytes(0) is not None

    def token_bytes(self) -> tuple[list[bytes], list[int]] | None:
        """Return what each token adds to a text, by id, and which are special: those have names.

        Takes a tenth of a second for 100,000 tokens. None: what a token adds depends on others.
        """
        found = [self._decoding.token_bytes(token_id) for token_id in range(self.vocab_size)]
        for token_id in self.special_ids:
            if token_id < len(found):
                found[token_id] = (self._backend.id_to_token(token_id) or "").encode()
        known = [token for token in found if token is not None]
        return (known, sorted(self.special_ids)) if len(known) == len(found) else None

    @property
    def template_source(self) -> str | None:
        """The chat template, as it came with the model; None: there is none."""
        return self._template_source

    @functools.cached_property
    def _with_special(self) -> Decoding:
        """Decodes special tokens as the vocabulary's; made when it is first asked for."""
        return decoding_of(self._backend, frozenset())

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special: bool = True,
        shown: frozenset[str] = frozenset(),
        spaced: bool = False,
    ) -> Detokenizer:
        """Return a detokenizer for the sequence that follows `prompt_ids`.

        Args:
            prompt_ids: what precedes.
            skip_special: special tokens are no text, but those that are `shown`.
            shown: names of special tokens, and of what may be none.
            spaced: put spaces around special tokens, where they are text.

        The prompt is whole text: a character that it leaves incomplete is never completed. Its last
        token that isn't special decides whether a leading space is text.
        """
        if skip_special:
            return self._showing(shown).detokenizer(prompt_ids)
        made = self._with_special.detokenizer(prompt_ids)
        return Spaced(made, self.special_ids) if spaced else made

    def _showing(self, names: frozenset[str]) -> Decoding:
        """Decodes these special tokens as the vocabulary's; made when it is first asked for."""
        if names not in self._decodings:
            shown = {self._backend.token_to_id(name) for name in names} & self.special_ids
            hidden = self.special_ids - shown
            made = decoding_of(self._backend, hidden) if shown else self._decoding
            self._decodings[names] = made
        return self._decodings[names]


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


# -- a folder's files ---------------------------------------------------------------------------

log = logging.getLogger("tokenpod")

#: Fewer than so many has a token's id.
_DIGITS = 12

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


#: Where a config.json of a model that also sees or hears has its text model's, or a part with that.
_PARTS = ("text_config", "llm_config", "thinker_config")


class TokenizerPanic(Exception):
    """The tokenizer's library has panicked on a text; the text says where."""


@contextlib.contextmanager
def panics_named() -> Iterator[None]:
    """A panic of the library becomes a TokenizerPanic: it is a BaseException, and would pass by
    all that answers calls."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise TokenizerPanic(one_line(error)) from error


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a folder says.

    Args:
        backend: the library's tokenizer, with all added tokens.
        eos_token_ids: these end a sequence.
        chat_template: source; None: there is none.
        special_tokens: by name (`bos_token`, ...).
    """

    backend: Backend
    eos_token_ids: frozenset[int]
    chat_template: str | None
    special_tokens: dict[str, str]


def read_folder(folder: Path, template: str | None = None) -> TokenizerFiles:
    """Read the files that `Tokenizer.load` names. Raises TokenizerError."""
    config = read_object(folder / "tokenizer_config.json")
    model = read_object(folder / "config.json")
    special_tokens_map = read_object(folder / "special_tokens_map.json")
    named = {**_named_tokens(special_tokens_map), **_named_tokens(config)}
    backend = _read_backend(folder)
    _add_configured_tokens(backend, config, named)
    return TokenizerFiles(
        _fitted(backend, model, folder),
        eos_token_ids=_read_eos(folder, model, backend, named),
        chat_template=chosen_template(read_templates(folder, config), template),
        special_tokens=named,
    )


def _read_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    try:
        data = (
            read_bounded(path, MOST_VOCABULARY_BYTES) if path.exists() else converted_apart(folder)
        )
        with panics_named():
            return Backend.from_buffer(data)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise TokenizerError(f"{path} can't be read: {one_line(error)}") from error


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
    specials = [*named.values(), *map(_content, _further(config))]
    backend.add_special_tokens(
        [AddedToken(token, special=True) for token in specials if token and token not in known]
    )


def _further(config: dict[str, Any]) -> list[Any]:
    """Special tokens without names of their own. Raises TokenizerError unless they are listed."""
    value = config.get("additional_special_tokens") or []
    if isinstance(value, dict):
        return [*value.values()]
    if not isinstance(value, list):
        raise TokenizerError(
            f"tokenizer_config.json: additional_special_tokens is {value!r:.80}, not a list"
        )
    return value


def _configured_tokens(config: dict[str, Any]) -> Iterator[AddedToken]:
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    by_id = {
        int(key): token for key, token in listed.items() if key.isdecimal() and len(key) < _DIGITS
    }
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


def _fitted(backend: Backend, model: dict[str, Any], folder: Path) -> Backend:
    """`backend` without added tokens that the model has no rows for: published folders have such.

    Their text is then text as any other: its ids would be beyond the embedding. Raises
    TokenizerError if other tokens are beyond it too, or less than half of it has a token.
    """
    size = _of_model(model, "vocab_size")
    if type(size) is not int:
        return backend
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    ids = backend.get_vocab(with_added_tokens=True)
    own = max((token_id for token, token_id in ids.items() if token not in added), default=0) + 1
    check_vocabulary(own, len(ids), size, folder)
    beyond = sorted(token for token, token_id in ids.items() if token_id >= size)
    if not beyond:
        return backend
    log.warning(
        "the model has no rows for tokens that were added to its tokenizer: they are plain text",
        extra={"tokens": ", ".join(beyond[:8]), "count": len(beyond), "vocab_size": size},
    )
    file = json.loads(backend.to_str())
    file["added_tokens"] = [token for token in file["added_tokens"] if token["id"] < size]
    return Backend.from_str(json.dumps(file))


def check_vocabulary(end: int, count: int, size: int, source: object) -> None:
    """Raise TokenizerError unless ids below `end`, of `count` tokens, go with a model of `size`.

    Embeddings are often padded, by a few per cent; less than half is another model's tokenizer.
    """
    if end > size or count * 2 < size:
        raise TokenizerError(
            f"{source}: the tokenizer has {count} tokens, with ids up to {end - 1}, and the "
            f"model's vocabulary {size}: they don't belong together"
        )


def _of_model(model: dict[str, Any], name: str) -> Any:
    """A field of config.json, or of its part about text."""
    value = model.get(name)
    inner = next((model[part] for part in _PARTS if isinstance(model.get(part), dict)), None)
    return _of_model(inner, name) if value is None and inner is not None else value


def _read_eos(
    folder: Path, model: dict[str, Any], backend: Backend, named: dict[str, str]
) -> frozenset[int]:
    """Return the ids that end a sequence, from the first file that names any."""
    generation = read_object(folder / "generation_config.json").get("eos_token_id")
    if ids := _eos_ids(generation, folder):
        return ids
    if "eos_token" in named:
        token_id = backend.token_to_id(named["eos_token"])
        if token_id is not None:
            return frozenset([token_id])
    return _eos_ids(_of_model(model, "eos_token_id"), folder)


def _eos_ids(value: Any, folder: Path) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise TokenizerError(f"{folder}: eos_token_id is {value!r}, not a token id or a list")
    return frozenset(ids)
