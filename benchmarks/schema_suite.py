"""What JSON schemas are served, by public collections of them.

    python -P benchmarks/schema_suite.py suite JSON-Schema-Test-Suite      by keyword
    python -P benchmarks/schema_suite.py walks jsonschemabench/data        random texts, by folder

`suite` (github.com/json-schema-org/JSON-Schema-Test-Suite): each schema goes the way of a client's.
It is refused, or else each of its instances, as a text, is allowed or not:

    right     what is valid is allowed, what is not is not
    wrong     an invalid instance is allowed: the promise is broken
    narrower  a valid instance is not allowed: models can't write it; how texts are written counts
              too (properties come in the schema's order)

`walks` (github.com/guidance-ai/jsonschemabench): of each schema that is served, texts of random
allowed tokens are validated by the package `jsonschema`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from tokenpod.core.constraints import JsonSchema
from tokenpod.engine.constraints.guidance import Guidance, GuidanceMatcher
from tokenpod.engine.constraints.library import LimitReached, Refused
from tokenpod.service.constraints.json_schema import SchemaError, check_schema, read_schema

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
#: Of the suite's optional folders, those of formats.
_FORMATS = "optional/format"
_MOST_TOKENS = 600


class Served:
    """The way of a client's schema to a matcher, with tokens of one byte each."""

    def __init__(self) -> None:
        self._library = Guidance([bytes([byte]) for byte in range(256)], [])
        self._words = np.zeros(8, np.int32)

    def matcher(self, text: str) -> GuidanceMatcher:
        """At the beginning of a text. Raises SchemaError, Refused and LimitReached."""
        schema = read_schema(text)
        for _ in check_schema(schema):
            pass
        made = self._library.compile(JsonSchema(json.dumps(schema)))
        made.copy().fill(self._words)
        return made

    def allows(self, matcher: GuidanceMatcher, text: str) -> bool:
        """Whether a model could write this text, and end."""
        matcher = matcher.copy()
        try:
            for byte in text.encode():
                matcher.take(byte)
            return matcher.whole
        except LimitReached:
            return False

    def walk(self, matcher: GuidanceMatcher, chance: random.Random) -> str | None:
        """A text of random allowed tokens, ended as soon as it may be; None: it grew too long."""
        matcher, text = matcher.copy(), bytearray()
        while len(text) < _MOST_TOKENS:
            if matcher.fill(self._words) and (not self._words.any() or chance.random() < 0.5):
                return text.decode(errors="replace")
            allowed = np.flatnonzero(np.unpackbits(self._words.view(np.uint8), bitorder="little"))
            # What closes is chosen more often, so that texts come to an end.
            closing = [byte for byte in allowed.tolist() if byte in b'"]},']
            token = chance.choice(
                closing if closing and chance.random() < 0.6 else allowed.tolist()
            )
            text.append(token)
            matcher.take(token)
        return None


def ordered(value: Any, names: list[str]) -> Any:
    """A value whose properties are in the order of these names, and behind them the others."""
    if isinstance(value, list):
        return [ordered(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    order = sorted(value, key=lambda name: names.index(name) if name in names else len(names))
    return {name: ordered(value[name], names) for name in order}


def names_of(schema: Any) -> Iterator[str]:
    """Names of properties in their order, wherever they are."""
    if isinstance(schema, dict):
        for keyword in ("properties", "required"):
            yield from schema.get(keyword, ()) if schema.get(keyword) else ()
        for value in schema.values():
            yield from names_of(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from names_of(value)


def suite(folder: Path, *, verbose: bool) -> bool:
    """Print a table by keyword; whether nothing is wrong."""
    served, counts = Served(), defaultdict[str, Counter[str]](Counter)
    for draft, name in DRAFTS.items():
        root = folder / "tests" / draft
        files = [*sorted(root.glob("*.json")), *sorted((root / _FORMATS).glob("*.json"))]
        for path in files:
            keyword = f"format {path.stem}" if path.parent != root else path.stem
            for group in json.loads(path.read_text()):
                _group(served, draft, name, keyword, group, counts[keyword], verbose=verbose)
    print("| keyword | schemas served, refused | right | narrower | wrong |\n|---|---|---|---|---|")
    total: Counter[str] = Counter()
    for keyword, count in sorted(counts.items()):
        total += count
        print(_row(keyword, count))
    print(_row("all", total))
    return not total["wrong"]


def _row(name: str, count: Counter[str]) -> str:
    told = f"| {name} | {count['served']}, {count['refused']} "
    return told + f"| {count['right']} | {count['narrower']} | {count['wrong']} |"


def _group(
    served: Served,
    draft: str,
    name: str,
    keyword: str,
    group: dict[str, Any],
    count: Counter[str],
    *,
    verbose: bool,
) -> None:
    schema = group["schema"]
    if isinstance(schema, dict) and "$schema" not in schema:
        schema = {"$schema": name, **schema}
    try:
        matcher = served.matcher(json.dumps(schema))
    except (SchemaError, Refused, LimitReached) as error:
        count["refused"] += 1
        if verbose:
            print(f"refused  {draft} {keyword}: {group['description']}: {str(error)[:140]}")
        return
    count["served"] += 1
    names = [*names_of(schema)]
    for test in group["tests"]:
        data = test["data"]
        texts = {json.dumps(each, ensure_ascii=False) for each in (data, ordered(data, names))}
        allowed = any(served.allows(matcher, text) for text in texts)
        outcome = "right" if allowed == test["valid"] else "wrong" if allowed else "narrower"
        count[outcome] += 1
        if verbose and outcome != "right":
            print(f"{outcome:8} {draft} {keyword}: {group['description']}: {test['description']}")
            print(f"         {json.dumps(group['schema'])[:160]} {json.dumps(data)[:100]}")


def walks(folder: Path, *, texts: int, verbose: bool) -> bool:
    """Print a table by folder; whether every text is valid."""
    served, chance, fine = Served(), random.Random(1), True
    print("| folder | schemas | served | texts | too long | not valid | compile: median, p99 |")
    print("|---|---|---|---|---|---|---|")
    reasons: Counter[str] = Counter()
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        count: Counter[str] = Counter()
        times = []
        for path in sorted(part.glob("*.json")):
            count["schemas"] += 1
            text = path.read_text()
            began = time.perf_counter()
            try:
                matcher = served.matcher(text)
            except (SchemaError, Refused, LimitReached) as error:
                reasons[str(error).partition(", at ")[0][:70]] += 1
                continue
            times.append((time.perf_counter() - began) * 1e3)
            count["served"] += 1
            _walk(served, matcher, path, texts, chance, count, verbose=verbose)
        fine = fine and not count["not valid"]
        middle, last = np.percentile(times or [0], (50, 99))
        print(
            f"| {part.name} | {count['schemas']} | {count['served']} | {count['texts']} "
            f"| {count['too long']} | {count['not valid']} | {middle:.1f}, {last:.1f} ms |",
            flush=True,
        )
    for reason, n in reasons.most_common(20):
        print(f"    {n:5} {reason}")
    return fine


def _walk(
    served: Served,
    matcher: GuidanceMatcher,
    path: Path,
    texts: int,
    chance: random.Random,
    count: Counter[str],
    *,
    verbose: bool,
) -> None:
    schema = json.loads(path.read_text())
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    for _ in range(texts):
        try:
            text = served.walk(matcher, chance)
        except LimitReached:
            count["limits"] += 1
            continue
        if text is None:
            count["too long"] += 1
            continue
        count["texts"] += 1
        problem = next(validator.iter_errors(json.loads(text)), None)
        if problem is not None:
            count["not valid"] += 1
            if verbose:
                print(f"not valid  {path}: {problem.message[:200]} {[*problem.absolute_path]}")


def main() -> None:
    """Measure; the status is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("what", choices=("suite", "walks"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=2, help="random texts of each schema")
    parser.add_argument("--verbose", action="store_true", help="name each that is not right")
    asked = parser.parse_args()
    if asked.what == "suite":
        fine = suite(asked.folder, verbose=asked.verbose)
    else:
        fine = walks(asked.folder, texts=asked.texts, verbose=asked.verbose)
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
