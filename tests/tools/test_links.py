"""`make lint` finds links of pages that lead nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "links.py"


def check(*pages: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(SCRIPT), *map(str, pages)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "other.md").write_text("# Of `--flags`, and more\n\n```sh\n# no heading\n```\n")
    return tmp_path / "page.md"


def test_links_to_files_headings_and_other_places_are_right(page: Path) -> None:
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#of---flags-and-more) [c](#here) [d](https://a.invalid/b)\n"
        "![e](other.md)\n```\n[not](a-link.md)\n```\n"
    )
    done = check(page)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("target", ["no.md", "other.md#no", "#no", "other.md#no-heading"])
def test_a_link_that_leads_nowhere_is_named_with_its_page(page: Path, target: str) -> None:
    page.write_text(f"# Here\n[a]({target})\n")
    done = check(page)
    assert done.returncode == 1
    assert done.stderr == f"{page}: {target} leads nowhere\n"
