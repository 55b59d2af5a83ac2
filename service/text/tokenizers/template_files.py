"""A model folder's chat templates: by name, from every place that models are published with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenpod.service.text.tokenizers.files import (
    MOST_CONFIG_BYTES,
    TokenizerError,
    UnreadableFile,
    one_line,
    read_bounded,
    read_object,
)

#: The template of plain chats.
DEFAULT = "default"
#: Templates that a model has; models have one, seldom two or three.
_MOST_TEMPLATES = 64


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Sources by name: of `config` (tokenizer_config.json), of chat_template.json, of .jinja files.

    Files come before `config`. Raises TokenizerError.
    """
    return {
        **dict(_listed(config)),
        **dict(_listed(read_object(folder / "chat_template.json"))),
        **{name: _read(path) for name, path in _files(folder)},
    }


def chosen_template(templates: Mapping[str, str], wanted: str | None) -> str | None:
    """The source of one of a model's templates or of a file; by default, of its default one.

    Raises TokenizerError: `wanted` is neither.
    """
    if wanted is None:
        return templates.get(DEFAULT)
    if wanted in templates:
        return templates[wanted]
    path = Path(wanted)
    if not path.exists():
        names = ", ".join(sorted(templates)) or "none"
        raise TokenizerError(
            f"chat_template is {wanted}: there is no such file, and of the model's templates none "
            f"is called so (it has: {names})"
        )
    return _read(path)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    further = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if len(further) > _MOST_TEMPLATES:
        raise TokenizerError(
            f"{folder / 'additional_chat_templates'} has {len(further)} templates; "
            f"at most {_MOST_TEMPLATES} are read"
        )
    for path in further:
        yield path.stem, path
    path = folder / "chat_template.jinja"
    if path.exists():
        yield DEFAULT, path


def _listed(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of a `chat_template` that is a source, a list of names and sources, or an object of them."""
    value = config.get("chat_template")
    if isinstance(value, str):
        yield DEFAULT, value
    if isinstance(value, list):
        entries = [(x.get("name"), x.get("template")) for x in value if isinstance(x, dict)]
    else:
        entries = list(value.items()) if isinstance(value, dict) else []
    for name, source in entries:
        if isinstance(name, str) and isinstance(source, str):
            yield name, source


def _read(path: Path) -> str:
    try:
        return read_bounded(path, MOST_CONFIG_BYTES).decode()
    except (UnreadableFile, ValueError) as error:
        raise TokenizerError(f"{path} can't be read: {one_line(error)}") from error
