"""A model's tokenizer as one zip, for a gateway that does not have its folder."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

from tokenpod.service.text.encoder import Encoder

#: Beside the tokenizer itself: what says which tokens are special, and what the model is.
_BESIDE = (
    *("special_tokens_map.json", "added_tokens.json", "generation_config.json", "config.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "tokenizer.model.v3"),
)
_CONFIG, _TOKENIZER, _TEMPLATE = "tokenizer_config.json", "tokenizer.json", "chat_template"
#: Of every file: the same files make the same zip.
_DATE = (1980, 1, 1, 0, 0, 0)


def tokenizer_zip(encoder: Encoder) -> bytes:
    """The zip; takes a while. Its chat template is the one that this server renders."""
    tokenizer, folder = encoder.tokenizer, encoder.folder
    config = config_of(encoder, _CONFIG)
    config.pop(_TEMPLATE, None)
    if tokenizer.template_source is not None:
        config[_TEMPLATE] = tokenizer.template_source
    found = {_CONFIG: json.dumps(config).encode(), _TOKENIZER: tokenizer.backend.to_str().encode()}
    found |= {name: (folder / name).read_bytes() for name in _BESIDE if (folder / name).is_file()}
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(found.items()):
            archive.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_DEFLATED)
    return written.getvalue()


def config_of(encoder: Encoder, name: str = "config.json") -> dict[str, Any]:
    """A JSON object of the model's folder; empty if it is not there, or no object."""
    try:
        found = json.loads((encoder.folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
