"""Which kernels serving a model launches, by a model without weights, and without a GPU.

The model has shapes and types alone: its tensors are on a device without memory ("meta"). Its steps
are run as at a start, and launch what those of the model would; nothing is computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenpod.core.capacity import step_limits
from tokenpod.core.messages import EngineOptions
from tokenpod.engine.gpu.graphs import ladder
from tokenpod.engine.startup.assemble import device_executor, kv_dtype, make_pool
from tokenpod.engine.startup.kv_scales import EIGHT_BITS
from tokenpod.engine.steps.first_steps import warm_up, worst_step
from tokenpod.kernels.backends.triton import DETERMINISTIC, OPERATIONS
from tokenpod.kernels.gpu.compiling import Kernel, Notes
from tokenpod.kernels.gpu.launch import Gpu, stand_in
from tokenpod.kernels.operations.attention_ops import KVScales
from tokenpod.kernels.operations.parallel import parallel
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.folder import read_layout
from tokenpod.models.layers.reading import read_weights
from tokenpod.models.pooling.head import PoolingHead
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.shard import WHOLE, Shard
from tokenpod.models.weights.weights import Stack

if TYPE_CHECKING:
    from tokenpod.engine.startup.noted_group import NotedGroup

META = torch.device("meta")


#: What asks for a number, or whether it is none.
_READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
)


def _first(x: torch.Tensor) -> Sequence[int]:
    return x.shape


_ATEN = torch.ops.aten
#: What torch makes here by code that imports its compiler, which takes seconds: where the first
#: argument is the result, and otherwise the shape of the result, which has its type.
_IN_PLACE = _ATEN.addmm_.default, _ATEN.index_copy_.default
_SHAPES: dict[Any, Callable[..., Sequence[int]]] = {
    _ATEN.empty_like.default: _first,
    _ATEN.zeros_like.default: _first,
    _ATEN.mm.default: lambda x, y: (x.shape[0], y.shape[1]),
    _ATEN.linear.default: lambda x, weight, *_: (*x.shape[:-1], len(weight)),
}


class Nothing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What comes to the host from a device without memory is zeros."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled by torch here, and importing its compiler takes seconds.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, but for copies to the host."""
        del types
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if source.device == META and target.device != META:
                return target.zero_()
        if func is torch.ops.aten._to_copy.default and args[0].device == META:
            wanted = (kwargs or {}).get("device")
            if wanted is not None and torch.device(wanted) != META:
                return torch.zeros(args[0].shape, dtype=(kwargs or {}).get("dtype", args[0].dtype))
        if func in _READS and args[0].device == META:
            return 0
        if args and isinstance(args[0], torch.Tensor) and args[0].device == META:
            if func in _IN_PLACE:
                return args[0]
            if func in _SHAPES and args[0].is_contiguous():
                asked = kwargs or {}
                dtype, device = asked.get("dtype") or args[0].dtype, asked.get("device") or META
                return torch.empty(_SHAPES[func](*args), dtype=dtype, device=device)
        return func(*args, **(kwargs or {}))


class _Headers(Checkpoint):
    """Names, types and shapes of a checkpoint's tensors; their numbers are not read."""

    def read_into(
        self,
        target: torch.Tensor,
        name: str,
        axis: int | None = None,
        part: range = range(0),
        stack: Stack | None = None,
    ) -> None:
        """Leave `target` as it is."""
        if target.device != META:
            target.zero_()


def find_kernels(
    options: EngineOptions, gpu: Gpu, found: Callable[[Kernel], object] | None = None
) -> list[Kernel]:
    """The kernels that serving a model on such a GPU launches, in the order of first launches.

    `found` is called with each as soon as it is known. What adapters and draft models add is not
    among them; of sums over ranks what all ranks of the pod launch is. From then on this process
    launches no kernels. Raises ModelError for a folder that can't be read.
    """
    stand_in(gpu)
    notes = Notes(gpu.capability, found)
    notes.begin()
    group: NotedGroup | None = None
    if (place := options.placement) is not None:
        # Not above: with it comes what ranks meet by.
        from tokenpod.engine.startup.noted_group import NotedGroup

        group = NotedGroup(place.rank, place.world, META, one_pod=bool(place.secret))
    with Nothing(), torch.inference_mode():  # type: ignore[no-untyped-call]
        model = weightless_model(options, group)
        _run_steps(model, options, group)
    return notes.kernels


def _run_steps(model: Decoder, options: EngineOptions, group: NotedGroup | None) -> None:
    """Steps of every size and kind, as `assemble` and serving run them."""
    config, limits = model.config, step_limits(options)
    positions = min(options.max_total_tokens or config.max_positions, config.max_positions)
    pool = make_pool(model, limits.tokens, META)
    executor = device_executor(model, options, pool, positions, META, group=group)
    rows = 1 if config.own_state is not None else limits.rows
    drafts = limits.drafts, min(options.speculate, positions - 1)
    pools = model.pooling is not None

    def step(rows: int, prompt: int, drafts: tuple[int, int] = (0, 0), **more: bool) -> None:
        executor.release(range(rows))
        kind = {"scattered": False, "scored": False, "pools": pools} | more
        executor.launch(worst_step(rows, prompt, positions, drafts=drafts, **kind)).wait()

    step(rows, limits.prompt, drafts, edited=True)
    if (dtype := kv_dtype(model, options, META)) != model.dtype:
        warm_up(executor, [0] * min(limits.prompt, positions, 64))
        scales = [KVScales(*torch.ones(2, each.heads, device=META)) for each in config.kv_layouts]
        own = scales if dtype == EIGHT_BITS else None
        pool = make_pool(model, limits.tokens, META, dtype, own)
        executor.use(pool)
    pool.reserve(limits.rows)
    # Captured steps read all slots as if they were scattered.
    step(rows, limits.prompt, drafts, edited=True, scattered=not model.captures)
    if model.captures:
        executor.capture()
    # Steps that are not captured are of any size up to the largest.
    for tokens in ladder(limits.prompt):
        step(1, tokens)
    # Where images' tokens see each other: in adjacent slots, and in scattered ones.
    for scattered in (False, True) if config.mutual else ():
        step(1, limits.prompt // 2, mutual=True, scattered=scattered)
    warm_up(executor, [0] * min(limits.prompt, positions, 64), pools=pools)


def weightless_model(options: EngineOptions, group: NotedGroup | None) -> Decoder:
    """The served model's layers up to the first that is like one of those before, and its ends.

    Of a group, this rank's part. Raises ModelError as `load_model` does for a folder that it can't
    read.
    """
    shard = Shard(group.rank, group.world) if group else WHOLE
    folder = Path(options.model_folder)
    override = json.loads(options.config_override) if options.config_override else None
    with _Headers(folder) as checkpoint:
        layout = read_layout(
            folder,
            checkpoint,
            options.max_total_tokens,
            options.quantize,
            quantize_head=options.quantize_head,
            override=override,
            task=options.task,
        )
        spec = replace(_few_layers(layout.spec), drafts=options.speculate)
        dtype = getattr(torch, options.dtype) if options.dtype else spec.dtype or torch.float32
        tensors = read_weights(
            checkpoint,
            [weight for weight in layout.weights if _layer(weight.name) < len(spec.layers)],
            dtype=dtype,
            device=META,
            progress=_ignore,
            shard=shard,
            reader=layout.reader,
        )
    pooling = None if layout.pooling is None else PoolingHead(layout.pooling)
    ops = DETERMINISTIC if options.deterministic else OPERATIONS
    if group is not None:
        ops = parallel(group.noting(ops), group)
    return Decoder(spec.on_rank(shard), tensors, ops, pooling=pooling)


def _few_layers(spec: ModelSpec) -> ModelSpec:
    """The first layers, as many as have one of each kind."""
    kinds = set(spec.layers)
    count = next(n for n in range(1, len(spec.layers) + 1) if set(spec.layers[:n]) == kinds)
    return replace(spec, layers=spec.layers[:count])


def _layer(name: str) -> int:
    """Of a weight by our name; -1: it is of none."""
    first = name.split(".")[0]
    return int(first) if first.isdigit() else -1


def _ignore(done: int, total: int) -> None:
    del done, total
