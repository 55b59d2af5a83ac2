"""Write docs/settings.md from the settings model. Nobody edits what it writes.

python tools/settings_docs.py           write it
python tools/settings_docs.py --check   fail if what is there is not what the model gives
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tokenpod.service.config.rules import flag
from tokenpod.service.config.settings import Group, default_text, descriptions, group_of
from tokenpod.service.config.sources import ServerSettings, variable

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"

HEAD = """\
# Settings

<!-- Written by tools/settings_docs.py from the table of settings; `make docs` writes it again. -->

What `tokenpod serve` takes. A flag wins over its variable, a variable over the file that `--config`
names, that over the default; a variable that is set to nothing counts as not set. Keys of the file
are flags without their dashes in front: `max-best-of: 4`. Names are those of TGI's launcher
wherever both have the thing. Each wrong value gets an error of one line before anything is loaded,
with exit status 2.

In Kubernetes, a Service called `tokenpod` in the same namespace gives every pod a variable
`TOKENPOD_PORT` that holds a URL. Such values (`tcp://...`) are ignored.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(section(group) for group in Group)])


def section(group: Group) -> str:
    """One group's table."""
    lines = [
        f"## {group.value}",
        "",
        "| flag | variable | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, field in ServerSettings.model_fields.items():
        if group_of(field) == group.value:
            cells = [f"`{flag(name)}`", f"`{variable(name)}`", default_text(field)]
            lines.append(f"| {' | '.join([*cells, descriptions()[name]])} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is stale")
    if not parser.parse_args().check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
        print("stale: docs/settings.md (run `make docs`)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
