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

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenpod.core.capacity import step_limits
from tokenpod.core.messages import EngineOptions
from tokenpod.engine.gpu.graphs import ladder
from tokenpod.engine.startup.assemble import device_executor, kv_dtype, make_pool
from tokenpod.engine.startup.kv_scales import EIGHT_BITS
from tokenpod.engine.startup.sampling_kernels import META, launch_sampling
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
from tokenpod.models.weights.shard import WHOLE, Shard
from tokenpod.models.weights.weights import Stack

if TYPE_CHECKING:
    from tokenpod.engine.startup.noted_group import NotedGroup

#: What asks for a number, or whether it is none.
_READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
)


def _first(x: torch.Tensor) -> Sequence[int]:
    return x.shape


def _without(x: torch.Tensor, axes: Sequence[int], keep: bool = False) -> Sequence[int]:
    gone = {axis % x.dim() for axis in axes}
    kept = [1 if axis in gone else n for axis, n in enumerate(x.shape)]
    return kept if keep else [n for axis, n in enumerate(kept) if axis not in gone]


_ATEN = torch.ops.aten
#: What torch makes here by code that imports its compiler, which takes seconds: where the first
#: argument is the result, and otherwise the shape of the result, which has its type. What goes
#: number by number is such code, too.
_IN_PLACE = _ATEN.addmm_.default, _ATEN.index_copy_.default
_SHAPES: dict[Any, Callable[..., Sequence[int]]] = {
    _ATEN.empty_like.default: _first,
    _ATEN.zeros_like.default: _first,
    _ATEN.mm.default: lambda x, y: (x.shape[0], y.shape[1]),
    _ATEN.linear.default: lambda x, weight, *_: (*x.shape[:-1], len(weight)),
    _ATEN.amax.default: _without,
    _ATEN.amin.default: _without,
    _ATEN.sum.dim_IntList: _without,
}
#: Ops that go number by number and are not marked as such.
_UNMARKED = (
    _ATEN.__ior__.Tensor,
    _ATEN.__and__.Scalar,
    _ATEN.floor_divide.default,
    _ATEN.where.ScalarOther,
)


def _number_by_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What `func` makes of tensors: as the host makes it of their first numbers, or of all."""
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    if all(each.is_contiguous() for each in tensors):
        hosts = [torch.ones([1] * each.dim(), dtype=each.dtype) for each in tensors]
        shape = np.broadcast_shapes(*(each.shape for each in tensors))
        dtype = _on_host(func, args, kwargs, hosts).dtype
        return torch.empty(shape, dtype=dtype, device=META)
    # How the result lies depends on how these do.
    hosts = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in tensors]
    made = _on_host(func, args, kwargs, hosts)
    return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=META)


def _on_host(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hosts: list[torch.Tensor]
) -> torch.Tensor:
    """Of these in the place of tensors."""
    given = iter(hosts)
    each = [next(given) if isinstance(arg, torch.Tensor) else arg for arg in args]
    made: torch.Tensor = func(*each, **kwargs)
    return made


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
        if func.overloadpacket is _ATEN.arange and (kwargs or {}).get("device") == META:
            made = func(*args, **{**(kwargs or {}), "device": torch.device("cpu")})
            return torch.empty(made.shape, dtype=made.dtype, device=META)
        if func is _ATEN.cat.default and args[0][0].device == META:
            parts, axis = args[0], args[1] if len(args) > 1 else 0
            shape = list(parts[0].shape)
            shape[axis] = sum(part.shape[axis] for part in parts)
            return parts[0].new_empty(shape)
        if args and isinstance(args[0], torch.Tensor) and args[0].device == META:
            if func in _IN_PLACE:
                return args[0]
            if func in _SHAPES and args[0].is_contiguous():
                asked = kwargs or {}
                dtype, device = asked.get("dtype"), asked.get("device") or META
                if dtype is None:
                    # Sums of integers have 64 bits.
                    sums = func is _ATEN.sum.dim_IntList and not args[0].is_floating_point()
                    dtype = torch.int64 if sums else args[0].dtype
                return torch.empty(_SHAPES[func](*args), dtype=dtype, device=device)
            pointwise = torch.Tag.pointwise in func.tags or func in _UNMARKED
            if pointwise and "out" not in (kwargs or {}):
                if func._schema.is_mutable:
                    return args[0]
                return _number_by_number(func, args, kwargs or {})
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
    if not pools and (group is None or group.rank == 0):
        # Steps above draw without masks, or report nothing of those that have them.
        most_edits = max(options.max_logit_edits + len(config.eos_token_ids), 1)
        launch_sampling(config.vocab_size, model.dtype, most_edits)


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
        spec = replace(layout.spec, drafts=options.speculate)
        spec = replace(spec, layers=spec.layers[: spec.layers_of_all_kinds])
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


def _layer(name: str) -> int:
    """Of a weight by our name; -1: it is of none."""
    first = name.split(".")[0]
    return int(first) if first.isdigit() else -1


def _ignore(done: int, total: int) -> None:
    del done, total
