"""Time decode steps with LoRA adapters on a GPU: what they cost, and which tiles are best.

    python -P benchmarks/gpu_lora.py                    # each case, as serving makes it
    python -P benchmarks/gpu_lora.py --search           # and in other ways, with other tiles
    python -P benchmarks/gpu_lora.py --profile          # and where the time of a step goes
    python -P benchmarks/gpu_lora.py --rank 64 --slots 8
    python -P benchmarks/gpu_lora.py --room 64          # slots as --max-adapter-rank 64 makes them
    python -P benchmarks/gpu_lora.py --vocabulary       # what embedding and head cost besides

The decoder of an 8B Llama shape in bfloat16, as in gpu_decode_step.py, captured in a graph: without
adapters, with slots of which no row has any, and with adapters on all products. Before that, on
two cases, the kernels' result is compared with the reference's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_decode_step import Stage, config, make_batch, make_stage

from tokenpod.kernels import reference
from tokenpod.kernels.adapter_ops import AdapterWeights
from tokenpod.kernels.batch import ForwardBatch
from tokenpod.kernels.triton import OPERATIONS, adapted, adapters
from tokenpod.kernels.triton.adapters import Tiles
from tokenpod.models.adapters.files import Base
from tokenpod.models.adapters.store import AdapterStore, Space
from tokenpod.models.adapters.targets import (
    EMBEDDING,
    Targets,
    products_of,
    vocabulary_products,
)
from tokenpod.models.decoder import Decoder
from tokenpod.models.names import Names, weights_of
from tokenpod.models.shard import WHOLE
from tokenpod.models.weights import HEAD

#: Rows, context, and different adapters among the rows.
CASES = ((64, 1024, 32), (64, 1024, 1), (16, 1024, 16), (1, 1024, 1))
REPLAYS = 24
#: Of log probabilities, by rounding alone, after 32 layers in bfloat16.
TOLERANCE = 0.15


@dataclass(frozen=True)
class Way:
    """How adapters' terms are made."""

    #: None: those of serving.
    tiles: Tiles | None = None
    #: Whether the first factors are multiplied beside the product.
    beside: bool = adapted.BESIDE
    #: Norm, product, adapters and gate one after the other.
    apart: bool = False

    def __str__(self) -> str:
        how = "each operation alone" if self.apart else "beside" if self.beside else "before"
        return f"{how}, {tuple(self.tiles) if self.tiles else 'tiles of serving'}"


SEARCHED = [
    Way(apart=True),
    Way(beside=not adapted.BESIDE),
    *(
        Way(Tiles(tokens, inputs, splits, warps, outputs, output_warps, by_row))
        for tokens, inputs, splits, warps, outputs, output_warps, by_row in (
            (16, 256, 4, 4, 256, 4, False),
            (2, 256, 4, 4, 128, 1, True),
            (4, 256, 4, 4, 128, 1, True),
            (16, 256, 4, 4, 128, 1, True),
            (8, 256, 4, 4, 64, 1, True),
            (8, 256, 4, 4, 256, 1, True),
            (8, 256, 2, 4, 128, 1, True),
            (8, 128, 8, 2, 128, 1, True),
        )
    ),
]

#: Of `shrink` and `expand` alone.
SHRINKS = [
    Tiles(4, inputs, splits, warps, 128, 1, True)
    for inputs in (128, 256, 512)
    for splits in (4, 8, 16)
    for warps in (2, 4)
]
EXPANDS = [
    Tiles(tokens, 256, 4, 4, outputs, warps, by_row)
    for tokens, outputs, warps, by_row in (
        (2, 128, 1, True),
        (4, 64, 1, True),
        (4, 128, 1, True),
        (4, 256, 1, True),
        (16, 128, 1, True),
        (16, 256, 4, False),
    )
]


#: Of the head's factors with 128,256 outputs, beside the tiles of other products.
HEADS = [
    None,
    *(
        Tiles(tokens, 256, 4, 4, outputs, warps, by_row)
        for tokens, outputs, warps, by_row in (
            (8, 256, 1, True),
            (8, 512, 2, True),
            (8, 512, 4, True),
            (4, 256, 1, True),
            (16, 256, 1, True),
            (16, 256, 4, False),
            (64, 256, 4, False),
        )
    ),
    Tiles(8, 256, 16, 4, 128, 1, True),
    Tiles(8, 256, 16, 4, 256, 1, True),
]


def make_store(slots: int, rank: int, room: int, *, vocabulary: bool = False) -> AdapterStore:
    """Full of random adapters, whose products are small beside the base's."""
    weights = list(weights_of(config(), Names(), "model."))
    named = {product.name: product for product in products_of(weights, WHOLE)}
    base = Base(Targets("a benchmark's"), named, WHOLE, torch.bfloat16, room)
    space, tables = Space(slots, room, vocabulary=vocabulary), vocabulary_products(weights, WHOLE)
    store = AdapterStore(base, space, OPERATIONS, torch.device("cuda"), {}, tables)
    store._slots.normal_(std=0.02)
    store._ranks.fill_(rank)
    if store.vocabulary is not None:
        for each in store.vocabulary.weights.values():
            each.down.normal_(std=0.02)
            each.up.normal_(std=0.02)
        set_ranks(store, rank, rank)
    return store


def set_ranks(store: AdapterStore, embedding: int, head: int) -> None:
    """Of all adapters' factors of the two; 0: they have none."""
    assert store.vocabulary is not None
    store.vocabulary.ranks[EMBEDDING].fill_(embedding)
    store.vocabulary.ranks[HEAD].fill_(head)


def step_seconds(decoder: Decoder, batch: ForwardBatch, stage: Stage) -> float:
    """Of a captured step, the median of replays one by one."""
    return captured_seconds(lambda: decoder.logits(decoder.forward(batch, stage.pool), batch))


@contextmanager
def made(way: Way) -> Iterator[None]:
    """All steps are made so."""
    before = adapters.TILES, adapted.BESIDE
    if way.tiles is not None:
        adapters.TILES = ((1 << 31, way.tiles),)
    adapted.BESIDE = way.beside
    try:
        yield
    finally:
        adapters.TILES, adapted.BESIDE = before


@contextmanager
def left_out(name: str) -> Iterator[None]:
    """Steps are made without `shrink` or without `expand`: their results mean nothing."""
    before = adapted.shrink, adapted.expand, adapted.BESIDE
    if name == "shrink":
        # No second stream either.
        adapted.BESIDE = False
        adapted.shrink = adapters.room_for
    else:
        adapted.expand = lambda *_, **__: None
    try:
        yield
    finally:
        adapted.shrink, adapted.expand, adapted.BESIDE = before


def captured_seconds(run: Callable[[], object], replays: int = REPLAYS) -> float:
    """The median of replays one by one."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def alone(store: AdapterStore, rows: int, count: int) -> None:
    """Each product's two launches by themselves, of all layers one after the other."""
    t_adapter = torch.arange(rows, device="cuda") % count + 1
    for product in ("qkv", "output", "up", "down"):
        layers = [each for name, each in store._weights.items() if name.endswith(f".{product}")]
        inputs, outputs = layers[0].down.shape[-1], sum(layers[0].rows)
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        y = torch.zeros(rows, outputs, device="cuda", dtype=torch.bfloat16)
        for name, searched in (("shrink", SHRINKS), ("expand", EXPANDS)):
            found = []
            for tiles in searched:
                plan = adapters.plan_adapters(t_adapter, store._ranks, tiles)
                inner = adapters.shrink(x, layers[0], plan)
                run = partial(_launch_all, name, x, y, layers, plan, inner)
                found.append((captured_seconds(run, 5) / len(layers) * 1e6, tuple(tiles)))
            told = ", ".join(f"{seconds:.1f} {tiles}" for seconds, tiles in sorted(found)[:4])
            print(
                f"  {name} of {product} alone, {rows} rows, {count} adapters, microseconds: {told};"
                f" worst {max(found)[0]:.1f}",
                flush=True,
            )


def _launch_all(
    name: str,
    x: torch.Tensor,
    y: torch.Tensor,
    layers: list[AdapterWeights],
    plan: adapters.Plan,
    inner: torch.Tensor,
) -> None:
    for weights in layers:
        if name == "shrink":
            adapters.shrink(x, weights, plan, inner)
        else:
            adapters.expand(inner, weights, plan, y)


def with_adapters(batch: ForwardBatch, rows: int, count: int) -> ForwardBatch:
    return replace(batch, t_adapter=torch.arange(rows, device="cuda") % count + 1)


def compare(stage: Stage, store: AdapterStore) -> None:
    """With the reference's arithmetic of adapters; the rest of the step is the same."""
    for rows in (1, 16, 64):
        batch = with_adapters(make_batch(rows, 1024), rows, min(store._slots.shape[0], 5))
        found = []
        for ops in (OPERATIONS, reference.OPERATIONS):
            store._ops = replace(
                OPERATIONS,
                plan_adapters=ops.plan_adapters,
                adapt=ops.adapt,
                adapt_rows=ops.adapt_rows,
            )
            whole = replace(OPERATIONS, adapted=ops.adapted)
            decoder = Decoder(config(), dict(stage.weights), whole, adapters=store)
            logits = decoder.logits(decoder.forward(batch, stage.pool), batch)
            found.append(logits.float().log_softmax(-1))
        store._ops = OPERATIONS
        difference = (found[0] - found[1]).abs()
        mean, bare = difference.mean(), found[1].abs().mean()
        print(f"{rows} rows: kernels and reference differ by {mean:.4f} of {bare:.1f}", flush=True)
        assert mean < TOLERANCE


def vocabulary(stage: Stage, options: argparse.Namespace) -> None:
    """Time steps whose adapters have factors of embedding and head, beside those without."""
    room = options.room or options.rank
    plain = Decoder(config(), dict(stage.weights), OPERATIONS)
    layers = make_store(options.slots, options.rank, room)
    without = Decoder(config(), dict(stage.weights), OPERATIONS, adapters=layers)
    store = make_store(options.slots, options.rank, room, vocabulary=True)
    compare(stage, store)
    model = Decoder(config(), dict(stage.weights), OPERATIONS, adapters=store)
    check_both(model, store, options.rank, stage)
    for tokens in (64, 1024, 8192):
        embedding_alone(store, tokens)
    for rows, context, count in ((64, 1024, 32), (64, 1024, 1), (1, 1024, 1)):
        batch = make_batch(rows, context)
        own = with_adapters(batch, rows, min(count, options.slots))
        base, of_layers = step_seconds(plain, batch, stage), step_seconds(without, own, stage)
        print(
            f"{rows} x {context}: {base * 1e3:.3f} ms; {count} adapters of layers alone"
            f" {of_layers * 1e3:.3f} ms, {base / of_layers:.3f} of the rate",
            flush=True,
        )
        rank = options.rank
        for name, ranks in (
            ("room that none uses", (0, 0)),
            ("on the embedding too", (rank, 0)),
            ("on the head too", (0, rank)),
            ("on both", (rank, rank)),
        ):
            set_ranks(store, *ranks)
            seconds = step_seconds(model, own, stage)
            print(f"  {name}: {seconds * 1e3:.3f} ms, {base / seconds:.3f} of the rate", flush=True)
        for tiles in HEADS if rows > 1 else ():
            with head_planned(store, tiles):
                seconds = step_seconds(model, own, stage)
            how = tuple(tiles) if tiles else "tiles of serving"
            print(f"  on both, the head's {how}: {seconds * 1e3:.3f} ms", flush=True)
        if options.profile:
            profile(without, own, stage, "layers alone")
            profile(model, own, stage, "both")


def embedding_alone(store: AdapterStore, tokens: int) -> None:
    """Time what is added to the embeddings of so many tokens, all with adapters."""
    assert store.vocabulary is not None
    weights, ranks = store.vocabulary.weights[EMBEDDING], store.vocabulary.ranks[EMBEDDING]
    t_row = torch.randint(weights.down.shape[3], (tokens,), device="cuda")
    t_adapter = torch.arange(tokens, device="cuda") % len(ranks) + 1
    x = torch.zeros(tokens, weights.up.shape[2], device="cuda", dtype=torch.bfloat16)
    seconds = captured_seconds(lambda: OPERATIONS.adapt_rows(x, weights, t_row, t_adapter, ranks))
    print(f"embeddings of {tokens} tokens alone: {seconds * 1e6:.0f} microseconds", flush=True)


def check_both(model: Decoder, store: AdapterStore, rank: int, stage: Stage) -> None:
    """Fail unless factors of the embedding change logits, and those of the head."""
    batch = with_adapters(make_batch(16, 1024), 16, 5)
    found = []
    for ranks in ((0, 0), (rank, 0), (0, rank)):
        set_ranks(store, *ranks)
        found.append(model.logits(model.forward(batch, stage.pool), batch).float())
    set_ranks(store, rank, rank)
    embedding, head = ((each - found[0]).abs().mean() for each in found[1:])
    print(f"the embedding's factors move logits by {embedding:.4f}, the head's by {head:.4f}")
    assert min(embedding, head) > 0


@contextmanager
def head_planned(store: AdapterStore, tiles: Tiles | None) -> Iterator[None]:
    """The head's product is cut so."""
    assert store.vocabulary is not None
    ranks, ops = store.vocabulary.ranks[HEAD], store._ops

    def plan(t_adapter: torch.Tensor, own: torch.Tensor) -> adapters.AdapterPlan:
        return adapters.plan_adapters(t_adapter, own, tiles if own is ranks else None)

    store._ops = replace(ops, plan_adapters=plan)
    try:
        yield
    finally:
        store._ops = ops


def profile(decoder: Decoder, batch: ForwardBatch, stage: Stage, name: str) -> None:
    """Print which kernels a captured step's time goes to."""

    def run() -> torch.Tensor:
        return decoder.logits(decoder.forward(batch, stage.pool), batch)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    print(f"  {name}: kernels, launches, microseconds of all (they overlap)")
    for event in events[:10]:
        print(f"    {event.key[:70]:70} {event.count:5} {event.self_device_time_total:9.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument(
        "--room", type=int, help="ranks that slots have room for; by default --rank"
    )
    parser.add_argument("--search", action="store_true", help="try other ways and tiles")
    parser.add_argument("--profile", action="store_true", help="tell the time of each kernel")
    parser.add_argument("--alone", action="store_true", help="time both launches by themselves")
    parser.add_argument(
        "--vocabulary", action="store_true", help="time factors of embedding and head, and no more"
    )
    parser.add_argument("--cases", type=int, nargs="*", help="some of the cases, from 0")
    options = parser.parse_args()
    with torch.inference_mode():
        if options.vocabulary:
            vocabulary(make_stage(), options)
            return
        stage, store = (
            make_stage(),
            make_store(options.slots, options.rank, options.room or options.rank),
        )
        compare(stage, store)
        plain = Decoder(config(), dict(stage.weights), OPERATIONS)
        adapted_model = Decoder(config(), dict(stage.weights), OPERATIONS, adapters=store)
        without = replace(OPERATIONS, adapted=None)
        apart = Decoder(config(), dict(stage.weights), without, adapters=store)
        cases = [CASES[i] for i in options.cases or range(len(CASES))]
        for rows, context, count in cases:
            batch = make_batch(rows, context)
            own = with_adapters(batch, rows, min(count, options.slots))
            base, unused = (step_seconds(each, batch, stage) for each in (plain, adapted_model))
            print(f"{rows} x {context}: {base * 1e3:.3f} ms; slots unused {unused * 1e3:.3f} ms")
            for way in [Way(), *(SEARCHED if options.search else [])]:
                each = apart if way.apart else adapted_model
                with made(way):
                    try:
                        seconds = step_seconds(each, own, stage)
                    except Exception as error:
                        print(f"  {way}: {error}")
                        continue
                rate = f"{base / seconds:.3f} of the rate"
                print(f"  {count} adapters: {seconds * 1e3:.3f} ms, {rate}, {way}", flush=True)
            if options.search and rows > 1:
                for name in ("shrink", "expand"):
                    with left_out(name):
                        seconds = step_seconds(adapted_model, own, stage)
                    print(f"  without any {name}: {seconds * 1e3:.3f} ms", flush=True)
            if options.alone and rows > 1:
                alone(store, rows, min(count, options.slots))
            if options.profile:
                profile(plain, batch, stage, "without adapters")
                profile(adapted_model, own, stage, f"{count} adapters")


if __name__ == "__main__":
    main()
