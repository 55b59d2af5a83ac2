"""A file of tokens that changes, breaks and comes back."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tokenpod.service.rpc.token_file import KEEP_SECONDS, TokenFile


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("one\n\n  two  \n")
    return path


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(path: Path, clock: Clock) -> TokenFile:
    tokens = TokenFile(path, clock)
    assert tokens.knows(b"one")
    assert tokens.knows(b"two")
    assert not tokens.knows(b"three")
    return tokens


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.message.partition(";")[0] for record in caplog.records]
    caplog.clear()
    return found


def break_(path: Path, how: str) -> str:
    """Make a file bad; what is said of it."""
    if how == "empty":
        path.write_text("")
        return "the token file is empty"
    path.unlink()
    if how == "a folder":
        path.mkdir()
        return "the token file can't be read: Is a directory"
    return "the token file can't be read: No such file or directory"


@pytest.mark.parametrize("how", ["empty", "missing", "a folder"])
def test_the_last_good_tokens_count_for_a_minute(
    path: Path, clock: Clock, tokens: TokenFile, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = break_(path, how)
    for second in range(int(KEEP_SECONDS)):
        clock.now = float(second)
        assert tokens.knows(b"one")
        assert not tokens.knows(b"three")
    assert told(caplog) == [said]
    for _ in range(3):
        clock.now += 1.0
        assert not tokens.knows(b"one")
    assert told(caplog) == ["nobody is let in: there is no token"]
    if how == "a folder":
        path.rmdir()
    path.write_text("three\n")
    assert tokens.knows(b"three")
    assert not tokens.knows(b"one")
    assert told(caplog) == ["the token file is good again"]


def test_a_bad_file_has_one_minute_however_it_is_bad(
    path: Path, clock: Clock, tokens: TokenFile, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text("")
    assert tokens.knows(b"one")
    clock.now = KEEP_SECONDS - 1
    path.unlink()
    assert tokens.knows(b"one")
    assert len(told(caplog)) == 2
    clock.now = KEEP_SECONDS
    assert not tokens.knows(b"one")


def test_a_file_that_was_never_good_lets_nobody_in(path: Path, clock: Clock) -> None:
    path.write_text("\n \n")
    tokens = TokenFile(path, clock)
    assert not tokens.knows(b"")
    assert not tokens.knows(b"one")
    path.write_text("one\n")
    assert tokens.knows(b"one")


def test_a_change_without_a_new_time_of_change_is_seen(path: Path, tokens: TokenFile) -> None:
    """Two writes within one step of the file system's clock."""
    status = path.stat()
    path.write_text("six\n\n  ten  \n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert tokens.knows(b"six")
    assert not tokens.knows(b"one")


def test_no_right_token_is_refused_while_the_file_is_rewritten_in_place(
    path: Path, tokens: TokenFile
) -> None:
    over = threading.Event()

    def rewrite() -> None:
        while not over.is_set():
            path.write_text("one\n")

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        assert all(tokens.knows(b"one") for _ in range(2000))
    finally:
        over.set()
        writer.join()
