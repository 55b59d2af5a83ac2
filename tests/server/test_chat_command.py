"""`tokenpod chat` on a real terminal, against the shared server."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from support.clients.public_api import once, said
from support.pods.harness import ServerProcess
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

SECONDS, PRESS_AGAIN = 120, 5
PROGRAM = [sys.executable, "-P", "-m", "tokenpod", "chat"]
SHORT = 8


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._end, inner = pty.openpty()
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            # Readline draws nothing there.
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(inner)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, text: str) -> str:
        """What is shown up to the next `text`."""
        assert self._shows(text, SECONDS), f"no {text!r} in {self.seen!r}"
        shown, _, self.seen = self.seen.partition(text)
        return shown

    def _shows(self, text: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._end], [], [], left)[0]:
                return False
            try:
                self.seen += os.read(self._end, 65536).decode().replace("\r\n", "\n")
            except OSError as gone:
                raise AssertionError(f"ended without {text!r}: {self.seen!r}") from gone
        return True

    def press_ctrl_c(self, text: str) -> None:
        """Until `text` is shown.

        CPython notices no Ctrl-C between the prompt and its wait for a key: users press again.
        """
        for _ in range(SECONDS // PRESS_AGAIN):
            os.killpg(self.process.pid, signal.SIGINT)
            if self._shows(text, PRESS_AGAIN):
                break
        self.until(text)

    def say(self, *lines: str) -> str:
        """What is answered to these lines, the closing note left out."""
        for prompt, line in zip(["> ", *[". "] * len(lines)], lines, strict=False):
            self.enter(prompt, line)
        return self.until("\n[length]\n").strip("\n")

    def enter(self, prompt: str, line: str) -> None:
        """Type a line once the terminal asks for one."""
        self.until(prompt)
        self.type(f"{line}\n")
        self.until(f"{line}\n")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def terminal(server: ServerProcess) -> Iterator[Terminal]:
    flags = ["--address", server.address, "--max-new-tokens", str(SHORT), "--ignore-eos"]
    opened = Terminal(*flags)
    yield opened
    opened.close()


def answer(server: ServerProcess, *turns: tuple[str, str]) -> str:
    stopping: dict[str, Any] = {"max_new_tokens": SHORT, "ignore_eos": True}
    request = pb.GenerateRequest(chat=said(*turns), stopping=stopping)
    return once(GenerationServiceStub(server.channel()), request).results[0].text


def test_turns_are_kept_and_lines_joined(server: ServerProcess, terminal: Terminal) -> None:
    terminal.until("/help")
    first = terminal.say("Sum a list.")
    assert first == answer(server, ("user", "Sum a list.")).strip("\n")
    second = terminal.say("Now \\", "shorter.")
    history = [("user", "Sum a list."), ("assistant", answer(server, ("user", "Sum a list.")))]
    assert second == answer(server, *history, ("user", "Now \nshorter.")).strip("\n")
    terminal.enter("> ", "/system Be brief.")
    alone = terminal.say('"""', "Sum", "a list.", '"""')
    asked = [("system", "Be brief."), ("user", "Sum\na list.")]
    assert alone == answer(server, *asked).strip("\n")
    terminal.enter("> ", "/what")
    terminal.until("Ctrl-C ends an answer.")
    terminal.enter("> ", "/quit")
    assert terminal.process.wait(SECONDS) == 0


def test_ctrl_c_ends_an_answer_and_not_the_program(server: ServerProcess) -> None:
    terminal = Terminal("--address", server.address, "--max-new-tokens", "1900", "--ignore-eos")
    try:
        terminal.until("> ")
        terminal.press_ctrl_c("[Ctrl-D leaves]")
        terminal.enter("> ", "Write on and on.")
        # The answer has begun.
        terminal.until("\n")
        terminal.press_ctrl_c("[interrupted]")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(SECONDS) == 0
    finally:
        terminal.close()


def test_a_conversation_can_be_piped_in_and_an_error_ends_no_more_than_its_turn(
    server: ServerProcess,
) -> None:
    flags = ["--address", server.address, "--max-new-tokens", str(SHORT), "--ignore-eos"]
    lines = "x " * 4000 + "\nSum a list.\n"
    done = subprocess.run(
        [*PROGRAM, *flags], input=lines, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0
    assert "error: prompt has" in done.stderr
    assert done.stdout.strip("\n").removesuffix("\n[length]").strip("\n") == answer(
        server, ("user", "Sum a list.")
    ).strip("\n")
    nobody = subprocess.run(
        [*PROGRAM, "--address", "127.0.0.1:9"], input="", capture_output=True, text=True
    )
    assert nobody.returncode == 1
    assert nobody.stderr.startswith("error: can't reach 127.0.0.1:9")
