"""Masks of constrained output: which library makes them fast enough, measured on this machine.

    python -P benchmarks/constraints.py [--vocabularies 32768,131072,262144] [--tokens 200]

Trains a byte-level BPE vocabulary on the Python sources of this machine and cuts it to each size.
For each library that is installed, and each grammar: time to compile, time of the first mask, and
time per mask over walks that choose a random allowed token at each position, as a model of random
weights does. Then: how much two threads bring (1: the library holds the interpreter's lock).
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_CORPUS_BYTES = 60_000_000
_END = "<|end|>"

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_WIDE = {
    "type": "object",
    "properties": {
        f"field_{i}": [{"type": "string"}, {"type": "number"}, {"enum": [f"v{i}", i]}][i % 3]
        for i in range(60)
    },
    "required": [f"field_{i}" for i in range(0, 60, 2)],
    "additionalProperties": False,
}
_ENUM = {"enum": [f"value number {i} of many" for i in range(500)]}
GRAMMARS: dict[str, tuple[str, str]] = {
    "any object": ("json_schema", json.dumps({"type": "object"})),
    "person": ("json_schema", json.dumps(_PERSON)),
    "60 fields": ("json_schema", json.dumps(_WIDE)),
    "enum of 500": ("json_schema", json.dumps(_ENUM)),
    "regex, date": ("regex", r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d( [a-z]{3,12}){0,20}"),
    "regex, nested counts": ("regex", "(a{1000}){1000}"),
}


class Library(Protocol):
    """One library under one vocabulary."""

    name: str

    def compile(self, kind: str, source: str) -> Any:
        """A compiled grammar."""

    def matcher(self, compiled: Any) -> Any:
        """A fresh matcher of it."""

    def fill(self, matcher: Any, mask: np.ndarray) -> None:
        """Write the mask, int32 words."""

    def accept(self, matcher: Any, token: int) -> bool:
        """Take a token; False if the text is over."""


class LLGuidance:
    """llguidance as the engine uses it: limits set, no tokens forced."""

    name = "llguidance"

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenpod.engine.constraints.guidance import Guidance
        from tokenpod.service.text.tokenizer import Tokenizer as Ours

        known = Ours(tokenizer).token_bytes()
        assert known is not None
        self._library = Guidance(*known)

    def compile(self, kind: str, source: str) -> Any:
        from tokenpod.core.constraints import JsonSchema, Regex

        return self._library.compile(Regex(source) if kind == "regex" else JsonSchema(source))

    def matcher(self, compiled: Any) -> Any:
        return compiled.copy()

    def fill(self, matcher: Any, mask: np.ndarray) -> None:
        matcher.fill(mask)

    def accept(self, matcher: Any, token: int) -> bool:
        try:
            matcher.take(token)
        except Exception:
            return False
        return True


class XGrammar:
    """xgrammar, which imports torch."""

    name = "xgrammar"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import torch
        import xgrammar

        self._of, self._torch = xgrammar, torch
        words = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
        kind = xgrammar.VocabType.BYTE_LEVEL
        info = xgrammar.TokenizerInfo(words, kind, stop_token_ids=[0])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, kind: str, source: str) -> Any:
        return getattr(self._compiler, f"compile_{kind}")(source)

    def matcher(self, compiled: Any) -> Any:
        return self._of.GrammarMatcher(compiled)

    def fill(self, matcher: Any, mask: np.ndarray) -> None:
        matcher.fill_next_token_bitmask(self._torch.from_numpy(mask[None]))

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token)) and not matcher.is_terminated()


def vocabulary(size: int) -> Tokenizer:
    """A byte-level BPE of at most so many tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_corpus(), trainer)
    return made


def _corpus() -> Iterator[str]:
    read = 0
    folders = [sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]]
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.py")):
        if read > _CORPUS_BYTES:
            return
        text = path.read_text(errors="ignore")[:400_000]
        read += len(text)
        yield text


def walk(library: Library, compiled: Any, words: int, tokens: int, seed: int) -> list[float]:
    """Milliseconds of each mask (and of the token before it) of random walks."""
    rng, times = np.random.default_rng(seed), []
    while len(times) < tokens:
        matcher, mask = library.matcher(compiled), np.zeros(words, np.int32)
        began = time.perf_counter()
        for _ in range(tokens - len(times)):
            library.fill(matcher, mask)
            times.append((time.perf_counter() - began) * 1e3)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not len(allowed):
                break
            token = int(rng.choice(allowed))
            began = time.perf_counter()
            if not library.accept(matcher, token):
                break
    return times


def measure(library: Library, words: int, tokens: int) -> None:
    """Print a line for each grammar, and what a second thread brings."""
    for name, (kind, source) in GRAMMARS.items():
        began = time.perf_counter()
        try:
            compiled = library.compile(kind, source)
        except Exception as error:
            print(f"  {name:22} {library.name:11} refused: {str(error)[:80]!r}")
            continue
        compile_ms = (time.perf_counter() - began) * 1e3
        began = time.perf_counter()
        library.fill(library.matcher(compiled), np.zeros(words, np.int32))
        first_ms = (time.perf_counter() - began) * 1e3
        times = np.array(walk(library, compiled, words, tokens, seed=1))
        p50, p99 = np.percentile(times, (50, 99))
        print(
            f"  {name:22} {library.name:11} compile {compile_ms:8.1f} ms  first {first_ms:7.2f} ms"
            f"  mask p50 {p50:7.3f}  p99 {p99:8.3f}  max {times.max():8.3f} ms",
            flush=True,
        )
    memory = _resident()
    kept = [
        library.compile("json_schema", json.dumps(_PERSON | {"title": str(i)})) for i in range(100)
    ]
    for each in kept:
        library.fill(library.matcher(each), np.zeros(words, np.int32))
    print(
        f"  a compiled schema of {len(json.dumps(_PERSON))} bytes takes"
        f" {(_resident() - memory) / 100 / 1024:.0f} KiB"
    )
    compiled = library.compile(*GRAMMARS["person"])
    one = _wall(lambda: walk(library, compiled, words, tokens, 2))
    with ThreadPoolExecutor(2) as pool:
        two = _wall(
            lambda: list(pool.map(lambda s: walk(library, compiled, words, tokens, s), (2, 2)))
        )
    print(f"  two threads do {2 * one / two:.2f} times the work of one")


def _resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _wall(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--vocabularies", default="32768,131072,262144")
    parser.add_argument("--tokens", type=int, default=200)
    asked = parser.parse_args()
    for size in map(int, asked.vocabularies.split(",")):
        tokenizer = vocabulary(size)
        words = -(-tokenizer.get_vocab_size() // 32)
        print(f"vocabulary of {tokenizer.get_vocab_size()}")
        for kind in (LLGuidance, XGrammar):
            try:
                began = time.perf_counter()
                library = kind(tokenizer)
            except ImportError as error:
                print(f"  {kind.name}: {error}")
                continue
            print(f"  {kind.name}: vocabulary read in {time.perf_counter() - began:.2f} s")
            measure(library, words, asked.tokens)


if __name__ == "__main__":
    main()
