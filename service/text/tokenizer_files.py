"""A model folder's tokenizer files: read up to a bound, and put together."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

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


def one_line(error: BaseException) -> str:
    """What `error` says, or else its kind."""
    return " ".join(str(error).split()) or type(error).__name__


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


def read_folder(folder: Path) -> TokenizerFiles:
    """Read the files that `Tokenizer.load` names. Raises TokenizerError."""
    config = _read_object(folder / "tokenizer_config.json")
    special_tokens_map = _read_object(folder / "special_tokens_map.json")
    named = {**_named_tokens(special_tokens_map), **_named_tokens(config)}
    backend = _read_backend(folder)
    _add_configured_tokens(backend, config, named)
    return TokenizerFiles(
        backend,
        eos_token_ids=_read_eos(folder, backend, named),
        chat_template=_read_chat_template(folder, config),
        special_tokens=named,
    )


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; an empty one if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_bounded(path, _MOST_CONFIG_BYTES))
    except (UnreadableFile, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} can't be read: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def _read_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            with panics_named():
                return Backend.from_buffer(read_bounded(path, _MOST_VOCABULARY_BYTES))
        except Exception as error:  # the library raises nothing more precise
            raise TokenizerError(f"{path} can't be read: {one_line(error)}") from error
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
            f"{folder / 'tokenizer.model'} can't be converted: {one_line(error)}"
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
            raise TokenizerError(f"{path} can't be read: {one_line(error)}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, dict))
        template = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    return template if isinstance(template, str) else None


# -- files that others have written ------------------------------------------------------------


class UnreadableFile(Exception):
    """The file can't be read, is no regular file or is too large; the text says which."""


def read_bounded(path: Path, most: int) -> bytes:
    """All of a regular file of up to `most` bytes; links are followed.

    A device such as /dev/zero never ends, and a pipe keeps its reader waiting: both are refused.

    UnreadableFile: see there.
    """
    try:
        # A pipe without a writer would not even open.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UnreadableFile("it is not a regular file")
            if status.st_size > most:
                raise UnreadableFile(f"it has {status.st_size} bytes; at most {most} are read")
            data = file.read(most + 1)
    except OSError as error:
        raise UnreadableFile(error.strerror or type(error).__name__) from error
    if len(data) > most:
        raise UnreadableFile(f"it has more than {most} bytes")
    return data
