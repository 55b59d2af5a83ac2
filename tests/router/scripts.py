"""What a story's seed decides: the router, its visitors, and what befalls them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from router.outcomes import Event
from router.records import Sampling
from router.startup import RouterSettings
from router.streams import Prompt
from router.wire import V2, V3, Wire


@dataclass(frozen=True)
class Visit:
    """A client: what it asks for, and when it hangs up."""

    prompt: Prompt
    #: After so many tokens.
    leaves_after: int | None = None
    #: When so many tokens have come to all clients since it came, wherever its request is.
    leaves_at: int | None = None


@dataclass(frozen=True)
class Act:
    """Clients that come one after another, or at once, and what happens meanwhile.

    Moments are numbers of tokens that all clients together have read since the act began.
    """

    visits: tuple[Visit, ...]
    #: Tokens between two arrivals; 0: a burst.
    spread: int
    #: Moments of liveness Prefills.
    probes: tuple[int, ...] = ()
    event: Event | None = None
    event_at: int = 0
    #: While the pod drains or is gone, whoever leaves is followed by one of these.
    followers: tuple[Visit, ...] = ()
    #: The next act begins when so many clients are left.
    overlap: int = 0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a shard can bear, and what it may be put through.

    Attributes:
        parts: what visitors choose from, without lengths.
        burst: most requests at once.
        prefill_tokens: `max_batch_prefill_tokens` to choose from.
        events: what may happen, each at most once in a story and never in its last act.
    """

    parts: tuple[Prompt, ...]
    burst: int = 300
    max_input_tokens: int
    max_total_tokens: int
    prefill_tokens: tuple[int, ...]
    wires: tuple[Wire, ...] = (V3(), V3(), V2())
    events: tuple[Event, ...] = (Event.RESTART,)


@dataclass(frozen=True)
class Script:
    """A whole story, before it is played."""

    seed: int
    wire: Wire
    settings: RouterSettings
    acts: tuple[Act, ...] = field(default=())


#: Visits of an act, and how often there are so many.
_SIZES = {5: 6, 10: 6, 20: 6, 40: 3, 300: 1}


def write(seed: int, stage: Stage) -> Script:
    """The script of a seed."""
    rng = random.Random(f"story {seed}")
    wire = rng.choice(stage.wires)
    acts = [_act(rng, stage) for _ in range(rng.randint(2, 3))]
    events = list(stage.events)
    rng.shuffle(events)
    # An act follows each, to show that whatever comes back serves.
    for number in range(len(acts) - 1):
        if events and rng.random() < 0.6:
            acts[number] = _interrupted(rng, acts[number], events.pop(), stage)
    return Script(seed, wire, _settings(rng, stage), tuple(acts))


def _settings(rng: random.Random, stage: Stage) -> RouterSettings:
    return RouterSettings(
        max_input_tokens=stage.max_input_tokens,
        max_total_tokens=stage.max_total_tokens,
        max_batch_prefill_tokens=rng.choice(stage.prefill_tokens),
        max_batch_size=rng.choice([None, None, None, 4, 32]),
        waiting_served_ratio=rng.choice([0.0, 0.3, 1.2]),
        max_waiting_tokens=rng.choice([0, 3, 20]),
        max_concurrent_requests=rng.choice([128, 512]),
    )


def _act(rng: random.Random, stage: Stage) -> Act:
    count = min(stage.burst, rng.choices(list(_SIZES), list(_SIZES.values()))[0])
    visits = tuple(_visit(rng, stage.parts) for _ in range(count))
    return Act(
        visits,
        spread=rng.choice([0, 0, 0, 1, 4]),
        probes=tuple(rng.randint(0, 4 * count) for _ in range(rng.randint(0, 4))),
        overlap=rng.randint(0, count // 2),
    )


def _interrupted(rng: random.Random, act: Act, event: Event, stage: Stage) -> Act:
    at = rng.randint(0, 4 * len(act.visits))
    count = 0 if event is Event.RESTART else rng.randint(0, 20)
    followers = tuple(_visit(rng, stage.parts) for _ in range(count))
    return replace(act, event=event, event_at=at, followers=followers)


def _visit(rng: random.Random, parts: Sequence[Prompt]) -> Visit:
    prompt, fate = rng.choice(parts), rng.random()
    if rng.random() < 0.1:
        prompt = replace(prompt, model=rng.choice(["gpt-4", "tiny", ""]))
    if rng.random() < 0.04:
        prompt = replace(prompt, grammar="[a-z]+(?=x)")  # look-ahead is refused
    if fate < 0.15:
        return Visit(prompt, leaves_after=rng.randint(1, prompt.max_new_tokens or 1))
    if fate < 0.3:
        return Visit(prompt, leaves_at=rng.randint(0, 300))
    return Visit(prompt)


def parts(texts: Sequence[str], new_tokens: Sequence[int]) -> tuple[Prompt, ...]:
    """Each text with each number of new tokens, greedy and, every third one, sampled."""
    made: list[Prompt] = []
    for text in texts:
        for new in new_tokens:
            sampled = len(made) % 3 == 2
            made.append(
                Prompt(
                    text=text,
                    input_length=0,
                    max_new_tokens=new,
                    ignore_eos_token=len(made) % 2 == 0,
                    sampling=Sampling(do_sample=sampled, seed=1 + len(made) if sampled else 0),
                )
            )
    return tuple(made)
