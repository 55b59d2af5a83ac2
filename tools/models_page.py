"""Write the architectures in docs/models.md from commands/models.json. Nobody edits the list.

python tools/models_page.py           write it
python tools/models_page.py --check   fail if what is there is not what the data gives
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from tokenpod.commands.models import Survey, survey

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN = (
    "<!-- Written by tools/models_page.py from commands/models.json; `make docs` does it again. -->"
)
END = "<!-- End of the list. -->"
#: What computes those that are served.
WHOSE = {"native": "tokenpod", "transformers": "transformers", "padded": "transformers, padded"}


def listed(found: Survey) -> str:
    """The list, between its marks."""
    count = {
        way: sum(entry.served == way for entry in found.classes.values())
        for way in ("native", "transformers", "padded", "no", "untried")
    }
    lines = [
        BEGIN,
        "",
        f"Of transformers {found.transformers}'s causal models and ours: {count['native']} are "
        f"native, {count['transformers']} are computed by transformers over our pool, "
        f"{count['padded']} with caches of their own, {count['no']} are not served, "
        f"{count['untried']} could not be tried. `make models` tries them again.",
        "",
        "| architecture | computed by | tested there | example |",
        "|---|---|---|---|",
    ]
    for name, entry in found.classes.items():
        if entry.served in WHOSE:
            whose = WHOSE[entry.served]
            example = f"`{entry.example}`" if entry.example else ""
            features = "as above" if entry.served == "native" else ", ".join(entry.features)
            lines.append(f"| `{name}` | {whose} | {features} | {example} |")
    lines += ["", "Not served, or not tried:", "", "| why | architectures |", "|---|---|"]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, entry in found.classes.items():
        if entry.reason:
            reasons[entry.reason.replace("|", "\\|")].append(f"`{name}`")
    lines += [f"| {why} | {', '.join(names)} |" for why, names in sorted(reasons.items())]
    return "\n".join([*lines, "", END])


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
