"""A model folder's tokenizer files: read up to a bound, and put together."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tokenpod.service.text.tokenizers.conversion import converted_apart
from tokenpod.service.text.tokenizers.files import (
    MOST_VOCABULARY_BYTES,
    TokenizerError,
    one_line,
    read_bounded,
    read_object,
)
from tokenpod.service.text.tokenizers.template_files import chosen_template, read_templates

__all__ = ["TokenizerError", "TokenizerFiles", "TokenizerPanic", "panics_named", "read_folder"]

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
