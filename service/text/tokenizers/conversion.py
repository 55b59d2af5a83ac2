"""Vocabularies of older formats to a `tokenizer.json`, by transformers: SentencePiece, tiktoken,
and the vocabulary and merges of GPT-2 and BERT.

`python -m tokenpod.service.text.tokenizers.conversion FOLDER` writes it to standard output, or one
line that says what is wrong. Transformers and what it brings take memory and seconds: hence a
process, which ends. No code of the model's folder is run.
"""

from __future__ import annotations

import base64
import binascii
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from tokenpod.core.own_process import die_with_parent
from tokenpod.service.text.tokenizers.files import (
    MOST_VOCABULARY_BYTES,
    TokenizerError,
    UnreadableFile,
    one_line,
    read_bounded,
    read_object,
)

#: What is converted, in order of preference.
VOCABULARIES = ("tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
#: Seconds. The largest vocabularies take a minute on a slow machine.
_PATIENCE = 600.0
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
#: Ids that a configuration may add beyond a tiktoken vocabulary.
_MOST_ADDED = 1 << 16


def converted_apart(folder: Path) -> bytes:
    """The `tokenizer.json` of a folder's vocabulary, made by a process. Raises TokenizerError."""
    command = [sys.executable, "-P", "-m", __name__, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        raise TokenizerError(
            f"{_vocabulary(folder)} can't be converted: it took more than {_PATIENCE:.0f} s"
        ) from None
    if done.returncode == 0:
        return done.stdout
    said = " ".join(done.stdout.decode(errors="replace").split())
    raise TokenizerError(
        said
        or f"{_vocabulary(folder)} can't be converted: its process ended with {done.returncode}"
    )


def converted(folder: Path) -> Backend:
    """The tokenizer of a folder's vocabulary. Raises TokenizerError, naming the file."""
    path = _vocabulary(folder)
    try:
        data = read_bounded(path, MOST_VOCABULARY_BYTES)
    except UnreadableFile as error:
        raise TokenizerError(f"{path} can't be read: {error}") from error
    try:
        if _TIKTOKEN_LINE.match(data):
            return _of_tiktoken(data, read_object(folder / "tokenizer_config.json"))
        return _of_transformers(folder)
    except TokenizerError:
        raise
    except Exception as error:  # anything, from a missing package to a file of another format
        raise TokenizerError(f"{path} can't be converted: {one_line(error)}") from error


def _vocabulary(folder: Path) -> Path:
    for name in VOCABULARIES:
        if (folder / name).exists():
            return folder / name
    raise TokenizerError(
        f"{folder} has neither tokenizer.json nor {', '.join(VOCABULARIES[:-1])} or "
        f"{VOCABULARIES[-1]}"
    )


def _of_transformers(folder: Path) -> Backend:
    from transformers.models.auto import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    backend = getattr(theirs, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ValueError(f"{type(theirs).__name__} has no tokenizer.json form")
    return backend


def _of_tiktoken(data: bytes, config: dict[str, Any]) -> Backend:
    """Lines of a token in base64 and its rank, as transformers converts them, without tiktoken.

    Raises ValueError.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    auto_map = config.get("auto_map")
    if isinstance(auto_map, dict) and "AutoTokenizer" in auto_map:
        raise ValueError("how it divides text is code that came with the model, which is not run")
    ranks = _ranks(data)

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks

    further = _further_tokens(config, len(ranks))
    converter: Any = Converter
    backend: Backend = converter(vocab_file="", extra_special_tokens=further).converted()
    return backend


def _ranks(data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        parts = line.split()
        if not parts:
            continue
        try:
            token, rank = parts
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} is no token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"its {len(ranks)} tokens have not the ranks 0 to {len(ranks) - 1}")
    return ranks


def _further_tokens(config: dict[str, Any], size: int) -> list[str]:
    """What the configuration has beyond the vocabulary, by id; gaps are named."""
    listed = config.get("added_tokens_decoder")
    named: dict[int, str] = {}
    for key, token in (listed if isinstance(listed, dict) else {}).items():
        content = token.get("content") if isinstance(token, dict) else token
        if key.isdigit() and int(key) >= size and isinstance(content, str):
            named[int(key)] = content
    end = max(named, default=size - 1) + 1
    if end - size > _MOST_ADDED:
        raise ValueError(
            f"tokenizer_config.json has the token id {end - 1}: at most {_MOST_ADDED} may follow "
            f"its {size} tokens"
        )
    return [named.get(index, f"<|reserved_token_{index}|>") for index in range(size, end)]


def main() -> int:
    """Convert the vocabulary of the folder that is the argument."""
    die_with_parent()
    # No tokenizer needs it, and transformers would import it: four of five seconds.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        text = converted(Path(sys.argv[1])).to_str()
    except TokenizerError as error:
        print(error)
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
