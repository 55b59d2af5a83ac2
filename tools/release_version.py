"""The project's version: pyproject.toml has it, and whatever else names it is written from there.

python tools/release_version.py           print it
python tools/release_version.py 0.2.0     make it another one, everywhere
python tools/release_version.py --check   fail if something names another one
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_OWN = r'(?m)^(version = ")([^"]+)(")$'
_IMAGE = r"(\btokenpod:)(\d[\w.]*)(-(?:cpu|cuda|warm)\b)"
#: Files and what in them names it: text before, the version, text after. The first has it.
PLACES = {
    "pyproject.toml": (_OWN, r'("tokenpod-client\[bench\]==)([^"]+)(")'),
    "client/pyproject.toml": (_OWN,),
    "deploy/helm/tokenpod/Chart.yaml": (r"(?m)^((?:appV|v)ersion: )(\S+)()$",),
    "deploy/observability/compose.yaml": (_IMAGE,),
    "deploy/gateway/compose.yaml": (_IMAGE,),
    "docs/clients.md": (r"(\bgen/go/v)(\d[\w.]*)(`)",),
    "docs/image.md": (_IMAGE,),
    "docs/kubernetes.md": (_IMAGE,),
    "docs/operations.md": (_IMAGE,),
}


def named() -> Iterator[tuple[str, str]]:
    """Each file with each version that it names. Raises SystemExit for a place without one."""
    for name, patterns in PLACES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for pattern in patterns:
            found = re.findall(pattern, text)
            if not found:
                raise SystemExit(f"{name} has nothing like {pattern}")
            yield from ((name, version) for _, version, _ in found)


def write(version: str) -> None:
    """Name this version in all places."""
    for name, patterns in PLACES.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        for pattern in patterns:
            text = re.sub(pattern, rf"\g<1>{version}\g<3>", text)
        path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", nargs="?", help="the new one, such as 0.2.0 or 0.2.0rc1")
    parser.add_argument("--check", action="store_true", help="only say what names another one")
    given = parser.parse_args()
    if given.version:
        if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", given.version):
            parser.error(f"{given.version!r} is no version such as 0.2.0 or 0.2.0rc1")
        write(given.version)
    places = list(named())
    version = places[0][1]
    wrong = [f"{name} names {other}, not {version}" for name, other in places if other != version]
    for line in wrong:
        print(line, file=sys.stderr)
    if not given.check:
        print(version)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
