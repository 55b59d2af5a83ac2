"""One attack after the other, in the order of a seed, and what each of them did."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chaos.attacks import ATTACKS, GROUP_ATTACKS, Attack
from chaos.routed import RoutedBystander, RoutedSeen
from chaos.scene import Bystanders, Pod, Seen, answer
from chaos.waiting import wait_for

_CLIENTS = 3
#: Calls of bystanders that must be served before and after each attack.
_SERVED = 3
#: Probes in a row without an answer after which kubelet restarts a pod, by its default.
_LOST_PROBES = 3


@dataclass(frozen=True)
class Row:
    """One attack's line in the table."""

    attack: str
    attacker: str
    seen: Seen
    routed: RoutedSeen
    #: Seconds of the attack, and from its end until a new client is served.
    seconds: float
    back: float
    #: MB that the pod's processes have more than before.
    grown: float
    #: What did not hold; "": all did.
    fault: str

    def cells(self) -> list[str]:
        """For the table."""
        return [
            self.attack,
            self.attacker,
            f"{self.seen.served} ({self.seen.retried})",
            f"{self.routed.served} ({self.routed.cut})",
            str(self.seen.wrong + self.seen.failed.total() + self.routed.wrong),
            f"{self.seen.probe_p99_ms:.0f}",
            str(self.seen.lost_probes),
            f"{self.back:.1f}",
            f"{self.grown:+.0f}",
            self.fault or "held",
        ]


HEAD = [
    "attack",
    "the attacker saw",
    "served to bystanders (tried again)",
    "to a router (cut off)",
    "failed or wrong",
    "probes p99, ms",
    "lost",
    "back, s",
    "memory, MB",
    "",
]


def campaign(
    seed: int, *, short: bool, tell: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """All attacks of the form; `tell` hears of each when it is over.

    A pod that has not withstood an attack is replaced, and the next attack is tried.
    """
    draw = random.Random(seed)
    scenes: list[tuple[Sequence[Attack], tuple[str, ...]]] = [
        (ATTACKS, ("--front-ends", "2" if short else "3", "--tool-parser", "hermes"))
    ]
    if not short:
        scenes.append((GROUP_ATTACKS, ("--num-shard", "2", "--threads", "1")))
    rows: list[Row] = []
    with asyncio.Runner() as attackers:
        for attacks, flags in scenes:
            chosen = [attack for attack in attacks if attack.least or not short]
            # What ends the pod comes last: starting takes most of the time.
            draw.shuffle(chosen)
            chosen.sort(key=lambda attack: attack.ends)
            pod = Pod(attackers, *flags)
            scene = _Scene(pod, Bystanders(pod, _CLIENTS, seed), RoutedBystander(pod.socket))
            try:
                wait_for(scene.served, "bystanders are not served before any attack")
                scene.look()
                for attack in chosen:
                    rows.append(_one(scene, attack, draw, short=short))
                    tell(rows[-1])
            finally:
                scene.close()
    return rows


@dataclass(frozen=True)
class _Scene:
    """A pod and those who must not notice."""

    pod: Pod
    clients: Bystanders
    router: RoutedBystander

    def served(self) -> bool:
        """Whether all of them have been served since the last look."""
        return self.clients.served() >= _SERVED and self.router.served() >= _SERVED

    def look(self) -> tuple[Seen, RoutedSeen]:
        """What they have met since the last look."""
        return self.clients.look(), self.router.look()

    def close(self) -> None:
        """End all."""
        self.router.close()
        self.clients.close()
        self.pod.close()


def _one(scene: _Scene, attack: Attack, draw: random.Random, *, short: bool) -> Row:
    pod = scene.pod
    before, began = pod.memory(), time.monotonic()
    attacker, fault = "", ""
    try:
        with scene.router.away() if attack.plays_router else contextlib.nullcontext():
            attacker = attack.strike(pod, draw, attack.least if short else attack.amount)
    except Exception as error:
        fault = f"the attack: {type(error).__name__}: {error}"
    ended = time.monotonic()
    if pod.server.process.poll() is not None:
        fault = fault or "the pod ended"
        pod.restart()
    back = _back(pod) - ended
    wait_for(scene.served, "bystanders are not served any more")
    seen, routed = scene.look()
    return Row(
        attack.name,
        attacker,
        seen,
        routed,
        ended - began,
        back,
        pod.memory() - before,
        fault or _fault(pod, attack, seen, routed),
    )


def _back(pod: Pod) -> float:
    """When a new client was served."""
    wait_for(lambda: _answers(pod), "a new client is not served")
    return time.monotonic()


def _answers(pod: Pod) -> bool:
    try:
        return bool(answer(pod.address))
    except Exception:
        return False


def _fault(pod: Pod, attack: Attack, seen: Seen, routed: RoutedSeen) -> str:
    """What did not hold for the bystanders."""
    try:
        pod.check_log()
    except AssertionError as error:
        return str(error)
    if seen.failed:
        return f"bystanders failed: {dict(seen.failed)}"
    if seen.wrong or routed.wrong:
        return f"{seen.wrong} wrong answers, {routed.wrong} to a router"
    if routed.cut and not (attack.ends or attack.cuts_router or attack.plays_router):
        return f"a router lost what it ran {routed.cut} times"
    if seen.lost_in_a_row >= _LOST_PROBES and not attack.ends:
        return f"{seen.lost_in_a_row} probes in a row lost"
    return ""


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
