"""Ranks of a group as real processes: each runs an engine of its own over its share of a model.

Every rank schedules by itself. That works because schedules depend on nothing but the requests and
the tokens, and tokens are the leader's everywhere: a follower that heard others would soon ask for
other steps, and its group would stand still.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from support.engines import guessing
from support.engines.engine_link import Client
from support.engines.planner_probe import preempt_sequence
from support.steps.rank_processes import run_ranks
from tokenpod.core.messages import EngineOptions
from tokenpod.core.plan import StepPlan
from tokenpod.core.requests import Request
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.shards.join import join_group
from tokenpod.engine.startup.assemble import Assembled, assemble, make_pool
from tokenpod.engine.startup.room import Room
from tokenpod.engine.steps.executor import Executor, Launched
from tokenpod.kernels.operations.group import Group
from tokenpod.kernels.operations.ops import Operations
from tokenpod.models import load as loading
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.load import load_model
from tokenpod.models.weights.shard import Shard
from tokenpod.scheduler.drafts.drafting import Drafting
from tokenpod.scheduler.kv.kv import KV
from tokenpod.scheduler.kv.preemption import PREEMPTIONS
from tokenpod.scheduler.scheduler import Limits, Scheduler

CPU = torch.device("cpu")
TIMEOUT = 60.0


class Said(msgspec.Struct):
    """What a rank's engine said of the sequences, by id."""

    slots: int = 0
    weight_bytes: int = 0
    parameters: int = 0
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    tops: dict[int, list[list[int]]] = {}
    scored: dict[int, list[float]] = {}
    failures: list[int] = []
    preemptions: int = 0
    #: Tokens that came back from the host's memory.
    fetched: int = 0
    #: Drafted tokens, and accepted ones.
    drafted: tuple[int, int] = (0, 0)


class Job(msgspec.Struct):
    """What one rank does: in each of its groups, answer the requests with each of its models."""

    rank: int
    #: (world, port, folders of models) of groups to join, one after the other.
    groups: list[tuple[int, int, list[str]]]
    requests: list[Request]
    options: EngineOptions
    #: With the executor of GPUs, its kernels interpreted.
    interpreted: bool = False
    #: Folders of models whose weights are to be of 8 bits, and their keys and values.
    quantised: list[str] = []
    #: Of the weights; None: the checkpoint's.
    dtype: str | None = None
    #: The chance of every sequence to be preempted before a turn.
    preempt: float = 0.0
    #: What the sequences are known to say, for drafts of this kind, so many for each row.
    expected: dict[int, list[int]] = {}
    guesses: str = ""
    drafts: int = 0


def answer(
    folder: Path,
    requests: list[Request],
    options: EngineOptions,
    group: Group | None = None,
    *,
    interpreted: bool = False,
    dtype: str | None = None,
    preempt: float = 0.0,
    drafting: Callable[[KV], Drafting] | None = None,
) -> Said:
    """One rank's engine, from loading to the last answer."""
    if interpreted:
        loading.operations_for = lambda device: interpreted_operations()
    model = load_model(
        folder,
        dtype=getattr(torch, dtype) if dtype else None,
        device=CPU,
        progress=lambda done, total: None,
        shard=Shard(group.rank, group.world) if group else Shard(),
        group=group,
        max_total_tokens=options.max_total_tokens,
        quantize=options.quantize,
    )
    positions = options.max_total_tokens
    assert positions is not None
    if interpreted:
        ready = as_on_a_gpu(model, options, positions, group)
    else:
        ready = assemble(model, options, positions=positions, device=CPU, group=group)
    limits = Limits(
        slots=ready.slots,
        max_rows=options.max_batch_size,
        max_positions=positions,
        prefill_tokens=options.max_batch_prefill_tokens,
        offload_slots=ready.offload_slots,
        offload_block=4,
        own_positions=model.config.own_positions,
    )
    preemption = PREEMPTIONS[options.preemption](1)
    link = Client(requests)
    scheduler = Scheduler(limits, drafting=drafting, preemption=preemption)
    executor = ready.executor if group is None or group.rank == 0 else FromBytes(ready.executor)
    loop = EngineLoop(link, scheduler, executor, overlap=ready.overlap)  # type: ignore[arg-type]
    chance = random.Random(8)
    for _ in range(1000):
        if not link.left:
            break
        for sequence in sorted(link.left):
            if chance.random() < preempt:
                preempt_sequence(scheduler, sequence)
        if ready.offload_slots:
            scheduler.kv.evict(scheduler.kv.tree.tokens)
        loop.turn()
    load = scheduler.load()
    return Said(
        slots=ready.slots,
        weight_bytes=model.weight_bytes,
        parameters=model.parameters_count,
        tokens=link.tokens,
        logprobs=link.logprobs,
        tops=link.tops,
        scored=link.scored,
        failures=[*link.failures],
        preemptions=load.preemptions,
        fetched=load.fetched_tokens,
        drafted=(load.drafted_tokens, load.accepted_tokens),
    )


class FromBytes:
    """A follower's executor: knows of a plan what travels, and that is not what samplers ask."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def launch(self, plan: StepPlan) -> Launched:
        return self._executor.launch(StepPlan.from_bytes(plan.to_bytes()))


def interpreted_operations() -> Operations:
    """A GPU's, but for products: interpreted, they take minutes, and have tests of their own."""
    import support.kernels.interpreted  # noqa: F401 - makes the interpreter quick
    from tokenpod.kernels.backends import reference, triton

    products = reference.OPERATIONS
    return replace(
        triton.OPERATIONS,
        prepare_linear=products.prepare_linear,
        prepare_norm_linear=products.prepare_norm_linear,
        prepare_add_linear=products.prepare_add_linear,
    )


def as_on_a_gpu(
    model: Decoder,
    options: EngineOptions,
    positions: int,
    group: Group | None,
    *,
    some: bool = False,
) -> Assembled:
    """The executor of GPUs, its steps "captured", without the tour of worst steps."""
    from tokenpod.engine.gpu.device_executor import DeviceExecutor
    from tokenpod.engine.gpu.device_sampler import device_sampler

    slots = options.max_batch_total_tokens
    assert slots is not None
    rows = options.max_batch_size
    executor = DeviceExecutor(
        model,
        make_pool(model, slots, CPU),
        device_sampler(
            group, rows=rows, vocab_size=model.config.vocab_size, device=CPU, most_edits=16
        ),
        rows=rows,
        max_positions=positions,
        max_tokens=rows + options.max_batch_prefill_tokens,
        device=CPU,
        own_positions=model.config.own_positions,
    )
    executor.capture(some=some)
    return Assembled(
        executor,
        Room(slots, options.max_batch_size, "asked for"),
        model.dtype,
        overlap=True,
        captures=executor if some else None,
    )


def _drafting(job: Job) -> Callable[[KV], Drafting]:
    vocabulary = 1 + max(max(tokens) for tokens in job.expected.values())
    return guessing.drafting(job.expected, job.guesses, job.drafts, vocabulary)


def options_for(job: Job, folder: str) -> EngineOptions:
    """What the engine of one of the job's models is told."""
    return eight_bits(job.options) if folder in job.quantised else job.options


def eight_bits(options: EngineOptions) -> EngineOptions:
    """For weights, and keys and values, of 8 bits."""
    return msgspec.structs.replace(options, quantize="int8", kv_cache_dtype="int8")


def run(jobs: list[Job]) -> list[list[list[Said]]]:
    """What each job's rank said, in a process of its own: by job, group and model."""
    return run_ranks(said_of, jobs)


def said_of(job: Job) -> list[list[Said]]:
    """What this process, a rank, says: by group and model."""
    if job.interpreted:
        # Its tensors are on the CPU: kernels are interpreted, whatever the machine has.
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    said = []
    for world, port, folders in job.groups:
        group = None
        if world > 1:
            group = join_group(job.rank, world, "127.0.0.1", port, device=CPU, timeout=TIMEOUT)
        said.append(
            [
                answer(
                    Path(f),
                    job.requests,
                    options_for(job, f),
                    group,
                    interpreted=job.interpreted,
                    dtype=job.dtype,
                    preempt=job.preempt,
                    drafting=_drafting(job) if job.guesses else None,
                )
                for f in folders
            ]
        )
        if group is not None:
            group.close()
    return said
