"""A model's tokenizer as one zip, for a gateway that does not have its folder."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from typing import Any

from tokenpod.service.admission.aside import Aside
from tokenpod.service.admission.memory_budget import MemoryBudget
from tokenpod.service.text.encoder import Encoder

#: Beside the tokenizer itself: what says which tokens are special, and what the model is.
_BESIDE = (
    *("special_tokens_map.json", "added_tokens.json", "generation_config.json", "config.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "tokenizer.model.v3"),
)
_CONFIG, _TOKENIZER, _TEMPLATE = "tokenizer_config.json", "tokenizer.json", "chat_template"
#: Of every file: the same files make the same zip.
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip, and the hex digits of its SHA-256."""

    data: bytes
    sha256: str


class TokenizerArchive:
    """The zip of a model's tokenizer: made when it is first asked for, then kept.

    Args:
        encoder: has the tokenizer, and the folder with the files beside it.
        memory: of the front ends, which the zip takes a part of.
        aside: where it is made.
    """

    def __init__(self, encoder: Encoder, memory: MemoryBudget, aside: Aside) -> None:
        self._aside = aside
        self._encoder = encoder
        self._memory = memory
        self._making: asyncio.Task[Archive] | None = None
        #: Bytes that are counted.
        self._kept = 0
        self._released = False

    async def get(self) -> Archive:
        """The zip, the same for all callers. Raises ResourceExhausted if it is too large."""
        if self._making is None:
            self._making = asyncio.create_task(self._make())
        # A caller that leaves does not end what others wait for.
        return await asyncio.shield(self._making)

    def release(self) -> None:
        """Another model is served from now on: this one's zip does not count any more."""
        self._released = True
        self._memory.give_back(self._kept)
        self._kept = 0

    async def _make(self) -> Archive:
        try:
            archive = await self._aside.run(functools.partial(_archive_of, self._encoder))
            if not self._released:
                self._memory.keep(len(archive.data))
                self._kept = len(archive.data)
        except BaseException:
            # The next caller tries again.
            self._making = None
            raise
        return archive


def _archive_of(encoder: Encoder) -> Archive:
    """The zip; takes a second. Its chat template is the one that this server renders."""
    # Not of the tokenizer here, whose library would keep the interpreter's lock for as long.
    model = encoder.text_model()
    config = config_of(encoder, _CONFIG)
    config.pop(_TEMPLATE, None)
    if model.chat_template is not None:
        config[_TEMPLATE] = model.chat_template
    folder = encoder.folder
    found = {_CONFIG: json.dumps(config).encode(), _TOKENIZER: model.tokenizer}
    found |= {name: (folder / name).read_bytes() for name in _BESIDE if (folder / name).is_file()}
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(found.items()):
            archive.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_DEFLATED)
    data = written.getvalue()
    return Archive(data, hashlib.sha256(data).hexdigest())


def config_of(encoder: Encoder, name: str = "config.json") -> dict[str, Any]:
    """A JSON object of the model's folder; empty if it is not there, or no object."""
    try:
        found = json.loads((encoder.folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
