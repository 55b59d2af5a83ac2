"""Find relative links in pages of Markdown that lead nowhere: to no file, or to no heading of one.

python tools/links.py           all pages of the repository; fails if a link leads nowhere
python tools/links.py PAGE...   these alone
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^ *```.*\n(?:.*\n)*? *```$", re.MULTILINE)
_LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


@cache
def _text(page: Path) -> str:
    """A page without its blocks of code."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Where a page's links lead, in their order."""
    return _LINK.findall(_text(page))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = (title.strip().lower() for title in _HEADING.findall(_text(page)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def broken(page: Path) -> Iterator[str]:
    """Its relative links that lead to no file, or to no heading of a page."""
    for target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            yield target


def pages() -> list[Path]:
    """Every page that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [page for name in names.splitlines() if (page := ROOT / name).is_file()]


def main() -> int:
    found = [Path(name).resolve() for name in sys.argv[1:]] or pages()
    wrong = [f"{page}: {target} leads nowhere" for page in found for target in broken(page)]
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
