"""Write the architectures in docs/models.md from commands/models.json. Nobody edits the list.

python tools/models_page.py           write it
python tools/models_page.py --check   fail if what is there is not what the data gives
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tokenpod.commands.models import WAYS, Entry, Survey, survey

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN = (
    "<!-- Written by tools/models_page.py from commands/models.json; `make docs` does it again. -->"
)
END = "<!-- End of the list. -->"
#: What computes those that are served.
WHOSE = {"native": "tokenpod", "transformers": "transformers", "padded": "transformers, padded"}
#: A text model may be of so many architectures: that is any.
MANY, ANY = 6, "any of the usual ones"
#: Characters of a reason.
LONGEST = 90


def listed(found: Survey) -> str:
    """The list, between its marks."""
    alone = {name: entry for name, entry in found.classes.items() if not entry.texts}
    count = {way: sum(x.served == way for x in alone.values()) for way in WAYS}
    lines = [
        BEGIN,
        "",
        f"Of transformers {found.transformers}'s causal models and ours: {count['native']} are "
        f"native, {count['transformers']} are computed by transformers over our pool, "
        f"{count['padded']} with caches of their own, {count['no']} are not served, "
        f"{count['untried']} could not be tried. `make models` tries them again. Native ones take "
        "every [format of weights](quantisation.md), the others dense weights. In brackets is "
        "`model_type`, where it is not the name in small letters.",
        "",
        *_table("computed by | what its tiny model had", _by_features(alone)),
        "",
        "Checkpoints that also see or hear, whose text alone is served:",
        "",
        *_table("computed by | text model", _by_texts(found.classes)),
        "",
        "Not served, or not tried:",
        "",
        *_table("why", _by_reason(alone)),
    ]
    return "\n".join([*lines, "", END])


def _table(keys: str, rows: dict[str, list[str]]) -> list[str]:
    """One row for what is alike."""
    head = [f"| {keys} | architectures |", "|---" * (keys.count("|") + 2) + "|"]
    return [*head, *(f"| {key} | {', '.join(names)} |" for key, names in rows.items())]


def _by_features(classes: Mapping[str, Entry]) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = defaultdict(list)
    for way, whose in WHOSE.items():
        of_way = {name: entry for name, entry in classes.items() if entry.served == way}
        for name, entry in sorted(of_way.items(), key=lambda x: (x[1].features, x[0])):
            rows[f"{whose} | {', '.join(entry.features)}"].append(_shown(name, entry))
    return rows


def _by_texts(classes: Mapping[str, Entry]) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = defaultdict(list)
    for name, entry in classes.items():
        if entry.texts:
            text = ", ".join(f"`{x}`" for x in entry.texts) if len(entry.texts) < MANY else ANY
            rows[f"{WHOSE[entry.served]} | {text}"].append(_shown(name, entry))
    return dict(sorted(rows.items(), reverse=True))


def _by_reason(classes: Mapping[str, Entry]) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = defaultdict(list)
    for name, entry in classes.items():
        if entry.reason:
            rows[_short(entry.reason)].append(f"`{name}`")
    return dict(sorted(rows.items()))


def _short(reason: str) -> str:
    """Its beginning: `tokenpod models` has all of it."""
    line = reason.replace("|", "\\|")
    return line if len(line) <= LONGEST else f"{line[:LONGEST].rpartition(' ')[0]} ..."


def _shown(name: str, entry: Entry) -> str:
    plain = name.split("For")[0].lower().replace("_", "")
    known = plain == entry.type.replace("_", "").replace("-", "") or not entry.type
    return f"`{name}`" + ("" if known else f" ({entry.type})")


def page(text: str, found: Survey) -> str:
    """The page with the list in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + listed(found) + after


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the list is stale")
    text = PAGE.read_text(encoding="utf-8")
    made = page(text, survey())
    if not parser.parse_args().check:
        PAGE.write_text(made, encoding="utf-8")
    elif text != made:
        print("stale: docs/models.md (run `make docs`)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
