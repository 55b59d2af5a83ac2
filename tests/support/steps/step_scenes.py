"""What a step's columns can say, each shown on any executor: run here, or by each rank of a group.

A scene drives an executor by hand and returns what its rows came to.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file

from support.shared import Shared
from support.steps import stepping
from support.steps.rank_processes import run_ranks
from support.steps.ranks import CPU, TIMEOUT, interpreted_operations
from support.steps.stepping import ROOM, VOCABULARY, Row
from tokenpod.core.new_row import NewRow
from tokenpod.core.plan import GIVEN, LAST, UNSAMPLED, plan_of
from tokenpod.engine.cpu.cpu_executor import CpuExecutor
from tokenpod.engine.drafts.draft import SmallModel, draft_of
from tokenpod.engine.shards.join import join_group
from tokenpod.engine.steps.executor import Executor, Words
from tokenpod.kernels.backends.registry import operations_for
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.adapter_ops import AdapterWeights, Added
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.group import Group
from tokenpod.kernels.operations.ops import Operations
from tokenpod.models import eagle, medusa
from tokenpod.models import load as loading
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.layers.linear import Weights
from tokenpod.models.load import load_model
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.shard import Shard

ROWS, PREFILL = 3, 12
SLOTS = (ROWS + 2) * ROOM
#: Slots of draft models' pools for what is found before a step is planned.
SPARE = 1 + 3 * ROWS
#: Samples besides rows' first ones that captured steps have room for.
DRAFTS = 3 * ROWS


class Told(msgspec.Struct):
    """What rows came to, by row."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    tops: list[dict[int, list[int]]]

    @classmethod
    def by(cls, rows: list[Row]) -> Told:
        return cls(
            [row.outputs for row in rows],
            [row.logprobs for row in rows],
            [row.tops for row in rows],
        )


@dataclass(frozen=True)
class Scene:
    """What a scene works with."""

    executor: Executor
    #: Tokens of each row, one at a time.
    expected: list[list[int]]
    #: [vocabulary, hidden] the embedding's table.
    table: torch.Tensor
    #: Whether a row asks for top tokens; interpreted, they take minutes.
    tops: bool = True
    #: Whether its draft model is one that is right now and then.
    guesses_well: bool = True

    def rows(self) -> list[Row]:
        return stepping.rows_of(stepping.requests(tops=self.tops))


def plain(scene: Scene) -> list[Row]:
    """One token at a time."""
    rows = scene.rows()
    stepping.begin(scene.executor, rows)
    stepping.go_on(scene.executor, rows)
    return rows


def drafts(scene: Scene) -> list[Row]:
    """Several at a time, right and wrong."""
    rows = scene.rows()
    stepping.begin(scene.executor, rows)
    stepping.go_on(scene.executor, rows, stepping.guesses(scene.expected))
    return rows


def overlapped_drafts(scene: Scene) -> list[Row]:
    """The same with two steps under way."""
    rows = scene.rows()
    stepping.begin(scene.executor, rows)
    stepping.go_on(scene.executor, rows, stepping.guesses(scene.expected), overlap=True)
    return rows


def found_drafts(scene: Scene) -> list[Row]:
    """Drafts that the executor finds, of some rows, and more of one than of another.

    Its draft model differs a little from the served one, so most of them are right.
    """
    rows = scene.rows()
    stepping.begin(scene.executor, rows)
    found = 0

    def drafts(row: int, outputs: list[int]) -> list[int]:
        nonlocal found
        found += 1
        return [LAST] * [2, 0, 3, 1][(row + found) % 4]

    stepping.go_on(scene.executor, rows, drafts)
    if scene.guesses_well:
        assert found < sum(map(len, (row.outputs for row in rows))) - len(rows), "some were right"
    return rows


def given(scene: Scene) -> list[Row]:
    """Some of each prompt's embeddings are given, in pieces: a row's only token, first and last."""
    rows = scene.rows()
    for row, *pieces in ((2, 0, 3, 5), (1, 0, 2), (0, 0)):
        for start, end in itertools.pairwise([*pieces, len(rows[row].request.prompt)]):
            piece = rows[row].prompt(start, end)
            assert piece.tokens is not None
            at = [i for i in range(end - start) if (start + i) % 3 != 1]
            tokens = list(piece.tokens)
            for number, i in enumerate(at):
                tokens[i] = GIVEN - number
            vectors = scene.table[[piece.tokens[i] for i in at]].numpy()
            stepping.run_step(
                scene.executor, [(rows[row], replace(piece, tokens=tokens, given=vectors))]
            )
    stepping.go_on(scene.executor, rows)
    return rows


def taken_again(scene: Scene) -> list[Row]:
    """Half-way each row is taken anew, as after a preemption: all that it had is in the cache."""
    rows = scene.rows()
    stepping.begin(scene.executor, rows)
    stepping.run_step(scene.executor, [(row, row.step()) for row in rows])
    planned = []
    for row in rows:
        new = NewRow(row.request, stream=0, outputs=tuple(row.outputs))
        planned.append((row, replace(row.step(), new=new, prefix=row.slots(0, row.held))))
    stepping.run_step(scene.executor, planned)
    stepping.go_on(scene.executor, rows, stepping.guesses(scene.expected))
    return rows


def adapter(scene: Scene) -> list[Row]:
    """One row has an adapter, whose delta changes its products alone."""
    rows = scene.rows()
    rows[ADAPTED].adapter = 1
    stepping.begin(scene.executor, rows)
    stepping.go_on(scene.executor, rows)
    return rows


def masks(scene: Scene) -> list[Row]:
    """Two rows are told what to say, one of them twice too late, and each once behind drafts.

    Behind the last of these there is no mask. One row's scores depend on what it has drawn.
    """
    rows = scene.rows()
    stepping.begin(scene.executor, rows)
    done_at = {}
    for turn in range(6):
        planned = []
        for row in rows:
            if row.left and row.row in FORCED:
                drafts = forced(row, 2) if (turn, row.row) in ((2, 2), (4, 0)) else []
                planned.append((row, row.step(drafts, masked=True)))
            elif row.left:
                planned.append((row, row.step()))
        planned.sort(key=lambda pair: len(pair[1].slots) > 1)
        launched = scene.executor.launch(plan_of(turn, [row for _, row in planned]))
        given = {
            at: np.stack([only(token) for token in forced(row, min(planned_row.samples, 2))])
            for at, (row, planned_row) in enumerate(planned)
            if planned_row.masked and not (turn in (1, 3) and row.row == 0)
        }
        if given:  # else the next launch goes on without
            launched.sample(given)
        result = launched.wait()
        # A follower can't tell what was late from what was bad.
        tokens = [UNSAMPLED if token == -1 else token for token in result.tokens]
        stepping.take(planned, replace(result, tokens=tokens))
        done_at |= {row.row: turn for row, _ in planned if not row.left}
    assert done_at == {0: 5, 1: 4, 2: 3}
    return rows


def masks_alone(scene: Scene) -> list[Row]:
    """All rows wait for masks: two are told what to say, one of them once too late.

    Whatever the third says is allowed.
    """
    rows = scene.rows()
    stepping.begin(scene.executor, rows)
    for turn in range(stepping.NEW_TOKENS):
        planned = [(row, row.step(masked=True)) for row in rows if row.left]
        launched = scene.executor.launch(plan_of(turn, [row for _, row in planned]))
        given = {
            at: only(forced(row, 1)[0])[None] if row.row in FORCED else anything()[None]
            for at, (row, _) in enumerate(planned)
            if (turn, row.row) != (1, 0)
        }
        launched.sample(given)
        result = launched.wait()
        # A follower can't tell what was late from what was bad.
        tokens = [UNSAMPLED if token == -1 else token for token in result.tokens]
        stepping.take(planned, replace(result, tokens=tokens))
    assert not any(row.left for row in rows)
    return rows


#: What rows are made to say under masks.
FORCED = {0: [3, 14, 15, 9, 26, 5, 35], 2: [2, 7, 18, 28, 18, 28, 45]}


def forced(row: Row, n: int) -> list[int]:
    """The next tokens that a row may say."""
    return FORCED[row.row][len(row.outputs) :][:n]


def only(token: int) -> Words:
    """A mask that allows one token."""
    bits = np.zeros(VOCABULARY, np.uint8)
    bits[token] = 1
    words = np.zeros(-(-VOCABULARY // 32) * 4, np.uint8)
    packed = np.packbits(bits, bitorder="little")
    words[: len(packed)] = packed
    return words.view(np.int32)


def anything() -> Words:
    """A mask that allows all tokens."""
    return sum((only(token) for token in range(VOCABULARY)), np.zeros_like(only(0)))


#: The row that `adapter` changes.
ADAPTED = 1

SCENES = {
    scene.__name__: scene
    for scene in (
        *(plain, drafts, overlapped_drafts, found_drafts),
        *(given, taken_again, adapter, masks, masks_alone),
    )
}


class Adapters:
    """Adds a constant to what products of tokens with an adapter make, before anything else."""

    def __init__(self) -> None:
        #: Of each product on this rank: what is added, by the operations of adapters.
        self._weights: dict[str, AdapterWeights] = {}

    def decoder(self, config: ModelSpec, weights: Weights, ops: Operations, **more: Any) -> Decoder:
        """A decoder whose products ask."""
        products = {name: weight for name, weight in weights.items() if weight.ndim == 2}
        products["head"] = weights.get("head", weights["embedding"])
        self._weights |= {
            # Gate and up are two parts of one product.
            name: _bias_alone(weight, parts=2 if name.endswith("up") else 1)
            for name, weight in products.items()
        }

        def delta(name: str, step: ForwardBatch | None) -> Added | None:
            # Of products whose inputs ranks divide, each rank would add the whole constant.
            if step is None or step.t_adapter is None or name.endswith(("output", "down")):
                return None
            ranks = torch.ones(1, dtype=torch.int32, device=step.t_adapter.device)
            plan = ops.plan_adapters(step.t_adapter, ranks)
            return Added(self._weights[name], plan, ops.adapt)

        return Decoder(config, weights, ops, delta=delta, **more)


def _bias_alone(weight: torch.Tensor, parts: int) -> AdapterWeights:
    """What adds 0.5 to every other output: which they are is the same on each rank."""
    outputs, inputs = weight.shape
    down = weight.new_zeros((1, parts, 1, inputs))
    up = weight.new_zeros((1, 1, outputs))
    bias = (torch.arange(outputs, device=weight.device) % 2 * 0.5).to(weight.dtype)
    return AdapterWeights(down, up, bias[None], rows=(outputs // parts,) * parts)


def save_model(folder: Path, layers: int = 1) -> Path:
    """A model whose vocabulary two ranks can't divide."""
    # Ranks need no more than what is saved, and start sooner without it.
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(2)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        save_draft(folder)
    return folder


def small_model(shared: Shared, layers: int = 1) -> Path:
    """Where the run has it."""
    return shared.folder(f"small-{layers}", partial(save_model, layers=layers))


def draft_folder(folder: Path) -> Path:
    """Where the draft model lies."""
    return folder / "draft"


def save_draft(folder: Path) -> None:
    """The served model with other weights in its layer, heads of another shape, and fewer tokens.

    Its layer adds little to the stream, so it says mostly what the served one would say without.
    """
    import transformers

    config = transformers.LlamaConfig.from_pretrained(folder)
    config.update({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8})
    config.vocab_size = VOCABULARY - 2
    served = load_file(folder / "model.safetensors")
    small = transformers.LlamaForCausalLM(config)
    names = {name: t for name, t in served.items() if t.shape == small.state_dict()[name].shape}
    ends = {n: served[n][:-2] for n in ("model.embed_tokens.weight", "lm_head.weight")}
    small.load_state_dict({**names, **ends}, strict=False)
    small.save_pretrained(draft_folder(folder))


def table_of(folder: Path) -> torch.Tensor:
    """The embedding's."""
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def operations(kind: str, device: torch.device) -> object:
    """Of a kind of executor."""
    if kind == "fast":
        return operations_for(device)
    if kind == "device" and device.type != "cuda":
        return interpreted_operations()
    package = "triton" if kind == "device" else kind
    return importlib.import_module(f"tokenpod.kernels.backends.{package}").OPERATIONS


def make(
    kind: str,
    folder: Path,
    device: torch.device,
    group: Group | None = None,
    head: Path | None = None,
) -> Executor:
    """An executor of one of the kinds: reference and device are a GPU's, the others a CPU's.

    `head`: where an EAGLE-3 head or Medusa heads lie that find drafts; None: a small model does.
    """
    on_device = kind in ("device", "reference")
    device = device if on_device else CPU
    with ExitStack() as patches:
        chosen = operations(kind, device)
        patches.enter_context(patch.object(loading, "operations_for", lambda d: chosen))
        small = load_model(
            draft_folder(folder),
            dtype=None,
            device=device,
            progress=lambda done, total: None,
            max_total_tokens=ROOM,
        )
        patches.enter_context(patch.object(loading, "Decoder", Adapters().decoder))
        model = load_model(
            folder,
            dtype=None,
            device=device,
            progress=lambda done, total: None,
            shard=Shard(group.rank, group.world) if group else Shard(),
            group=group,
            max_total_tokens=ROOM,
        )
        if head is not None:
            for module in (eagle, medusa):
                patches.enter_context(patch.object(module, "operations_for", lambda d: chosen))
            if medusa.is_medusa(head):
                found = medusa.load_medusa(head, model, heads=3, device=device)
            else:
                found = eagle.load_eagle(head, model, positions=ROOM, device=device)
    pool, own = (
        KVPool(slots=slots, layouts=each.config.kv_layouts, dtype=each.dtype, device=device)
        for each, slots in ((model, SLOTS), (small if head is None else found, SLOTS + SPARE))
    )
    if head is not None:
        draft = draft_of(found, model, own, most=3, rows=ROWS)
    else:
        whole = small if kind in ("cpu", "fast", "device") else Uncaptured(small)
        draft = SmallModel(whole, own, small.config.vocab_size, VOCABULARY, most=3)
    if not on_device:
        return CpuExecutor(model, pool, rows=ROWS, vocab_size=VOCABULARY, group=group, draft=draft)
    from tokenpod.engine.gpu import device_sampler
    from tokenpod.engine.gpu.device_executor import DeviceExecutor
    from tokenpod.engine.gpu.device_sampler import SamplerTiles

    tiles = partial(SamplerTiles, split=64, groups=4, block=64, pivots=4)
    with patch.object(device_sampler, "SamplerTiles", tiles):
        sampler = device_sampler.device_sampler(
            group, rows=ROWS, vocab_size=VOCABULARY, device=device, most_edits=16
        )
    executor = DeviceExecutor(
        model if kind == "device" else Uncaptured(model),
        pool,
        sampler,
        rows=ROWS,
        max_positions=ROOM,
        # With a head there are more layers: few sizes are captured.
        max_tokens=ROWS + (PREFILL if head is None else 5),
        device=device,
        drafts=DRAFTS,
        adapted=head is None,
        draft=draft,
    )
    if kind == "device":
        executor.capture()
    return executor


class Uncaptured:
    """A model of operations that are not captured."""

    def __init__(self, model: object) -> None:
        self._model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def prepare_capture(self, rows: int) -> Uncaptured:
        return self

    def count(self, tokens: int) -> int:
        return 0


class Job(msgspec.Struct):
    """One rank's part."""

    rank: int
    port: int
    kind: str
    folder: str
    scenes: list[str]
    expected: list[list[int]]
    #: Of a head that finds drafts, which guesses at random; empty: a small model does.
    head: str = ""


def run(
    kind: str,
    folder: Path,
    port: int,
    expected: list[list[int]],
    names: Sequence[str] = tuple(SCENES),
    head: str = "",
) -> list[dict[str, Told]]:
    """What each of two ranks, processes, came to, by scene."""
    jobs = [Job(rank, port, kind, str(folder), [*names], expected, head) for rank in range(2)]
    return run_ranks(told_of, jobs)


def told_of(job: Job) -> dict[str, Told]:
    """What this process, a rank, comes to, by scene."""
    torch.set_num_threads(1)
    group = join_group(job.rank, 2, "127.0.0.1", job.port, device=CPU, timeout=TIMEOUT)
    head = Path(job.head) if job.head else None
    executor = make(job.kind, Path(job.folder), CPU, group, head)
    tops = job.kind != "device"
    scene = Scene(
        executor, job.expected, table_of(Path(job.folder)), tops, guesses_well=head is None
    )
    told = {name: Told.by(SCENES[name](scene)) for name in job.scenes}
    group.close()
    return told
