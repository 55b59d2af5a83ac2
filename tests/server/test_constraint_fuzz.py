"""Odd constraints through a real pod: each is served or refused by name, beside all others.

FUZZ_CONSTRAINTS says how many; `make chaos` sends 3,000.
"""

from __future__ import annotations

import os

from support.clients.constraint_fuzz import ALLOWED, ROUTED, fuzz
from support.pods.harness import SERVING, serve

AMOUNT = int(os.environ.get("FUZZ_CONSTRAINTS", "120"))


async def test_what_a_constraint_does_is_its_own_requests() -> None:
    with serve("--tool-parser", "hermes") as pod:
        engine = pod.engine_pid()
        answers = await fuzz(f"127.0.0.1:{pod.port}", pod.uds, seed=1, amount=AMOUNT)
        assert answers.keys() <= {*ALLOWED, ROUTED}, answers
        assert min(answers[each] for each in (*ALLOWED, ROUTED)) > AMOUNT // 10, answers
        assert (pod.engine_pid(), pod.health()) == (engine, SERVING)
        log = pod.log.read_text()
        assert "internal error" not in log
        assert "Traceback" not in log
