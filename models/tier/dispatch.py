"""The attention function that transformers' models call: over our KV pool, with our operations.

    step -> transformers' layer -> AttentionFunction -> pool.keys[slot] = key; ops.attention(...)

The n-th call of a forward is the same layer in every step. `Recorder` notes, once, what each call
is; a `RunningStep` then answers the calls of one step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.nn import functional

from tokenpod.kernels.cache.kv_pool import KVLayout, KVPool
from tokenpod.kernels.operations.attention_ops import AttentionOptions, AttentionPlan
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.ops import Operations
from tokenpod.models.tier.chunks import in_chunks
from tokenpod.models.tier.errors import NotServed
from tokenpod.models.tier.masks import Reach

#: Arguments of attention functions that change nothing in a step: `is_causal` and masks are looked
#: at apart, the others are for training, for padded batches, or say what we know.
_WITHOUT_EFFECT = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "dropout",
    "is_causal",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_ids",
    "return_dict",
    "training",
    "use_cache",
}


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One call of the attention function: heads of queries, keys and values, and what they see."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    reach: Reach
    #: Which layer of the pool has its keys and values.
    layer: int
    #: Whether it writes them there; otherwise an earlier call has.
    stores: bool = True

    @property
    def kv(self) -> KVLayout:
        """What the pool has for a token: heads are held in pairs of numbers."""
        key_dim, value_dim = (dim + dim % 2 for dim in (self.key_dim, self.value_dim))
        return KVLayout(self.kv_heads, key_dim, value_dim)


class Answer(Protocol):
    """Takes the calls of one forward."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        **options: Any,
    ) -> torch.Tensor:
        """Query [1, H, T, D], key [1, K, T, D], value [1, K, T, Dv] -> [1, T, H, Dv]."""
        ...


class AttentionFunction:
    """What is registered with transformers, by a name of its own for each model."""

    def __init__(self) -> None:
        self.answer: Answer | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """What the model's answer is; the second result would be weights, which nobody asks for."""
        assert self.answer is not None, "attention outside of a step"
        return self.answer(module, query, key, value, attention_mask, **options), None


class Recorder:
    """Notes what the calls of a forward are; its results have the right shape and no meaning."""

    def __init__(self) -> None:
        self.dispatches: list[Dispatch] = []
        #: Keys and values as they came, in order of the pool's layers: kept, so that no other
        #: tensor can take their place in memory.
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def layouts(self) -> tuple[KVLayout, ...]:
        """What each layer of the pool has for a token."""
        return tuple(dispatch.kv for dispatch in self.dispatches if dispatch.stores)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        **options: Any,
    ) -> torch.Tensor:
        """Note the call; NotServed for what our attention is not told how to do."""
        _check_options(module, options)
        tokens = query.shape[2]
        if len(query) != 1 or key.shape[2] != tokens or value.shape[2] != tokens:
            raise NotServed(
                f"its attention asks {tokens} tokens of {key.shape[2]}: it is not over its own text"
            )
        layer = next((i for i, (k, v) in enumerate(self._seen) if k is key and v is value), None)
        dispatch = Dispatch(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            reach=_reach(module, mask, options),
            layer=len(self._seen) if layer is None else layer,
            stores=layer is None,
        )
        if layer is None:
            self._seen.append((key, value))
        self.dispatches.append(dispatch)
        return query.new_zeros((1, tokens, dispatch.heads, dispatch.value_dim))


def _check_options(module: torch.nn.Module, options: dict[str, Any]) -> None:
    known = {"scaling", "softcap", "s_aux", "sliding_window", *_WITHOUT_EFFECT}
    for name, value in options.items():
        if name not in known and value is not None and value is not False:
            raise NotServed(f"its attention function has an argument {name}, which is not served")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise NotServed("its attention is not causal")


def _reach(module: torch.nn.Module, mask: object, options: dict[str, Any]) -> Reach:
    """By the mask that the model builds; without one, by the window that it names."""
    if isinstance(mask, Reach):
        return mask
    if mask is not None:
        raise NotServed(f"{type(module).__name__} is given a mask that it builds by itself")
    return Reach(window=options.get("sliding_window"))


class RunningStep:
    """Answers the calls of one step.

    Args:
        dispatches: what the calls are, in order.
        batch: the step.
        pool: where keys and values lie.
        ops: whose attention.
    """

    def __init__(
        self,
        dispatches: tuple[Dispatch, ...],
        batch: ForwardBatch,
        pool: KVPool,
        ops: Operations,
    ) -> None:
        self._dispatches, self._batch, self._pool = dispatches, batch, pool
        self._attention = ops.attention
        self._plans = {
            reach: _plan(ops.plan_attention, batch, reach)
            for reach in {dispatch.reach for dispatch in dispatches}
        }
        self._calls = 0

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        **options: Any,
    ) -> torch.Tensor:
        """Attention over the pool, by the operations of the device: [1, T, H, Dv]."""
        del module, mask
        dispatch = self._dispatches[self._calls]
        self._calls += 1
        keys, values = self._pool.keys[dispatch.layer], self._pool.values[dispatch.layer]
        if dispatch.stores:
            for pool, own in ((keys, key), (values, value)):
                pool.index_copy_(0, self._batch.t_slot, _by_token(own, pool.shape[2]))
        scale, sinks = options.get("scaling"), options.get("s_aux")
        out = self._attention(
            _by_token(query, keys.shape[2]).contiguous(),
            keys,
            values,
            self._plans[dispatch.reach],
            AttentionOptions(
                scale=dispatch.key_dim**-0.5 if scale is None else float(scale),
                softcap=options.get("softcap"),
                sinks=None if sinks is None else sinks.flatten().float(),
            ),
        )
        return out.view(1, -1, dispatch.heads, values.shape[2])[..., : dispatch.value_dim]

    def check(self) -> None:
        """Every call has come."""
        assert self._calls == len(self._dispatches), (
            f"{self._calls} calls of attention; {len(self._dispatches)} were recorded"
        )


def _plan(
    plan: Callable[[ForwardBatch, int | None], AttentionPlan], batch: ForwardBatch, reach: Reach
) -> AttentionPlan:
    if reach.chunk is None:
        return plan(batch, reach.window)
    return plan(in_chunks(batch, reach.chunk), None)


def _by_token(x: torch.Tensor, width: int) -> torch.Tensor:
    """[1, heads, T, D] -> [T, heads, width], with zeros at the end."""
    turned = x[0].transpose(0, 1)
    return turned if x.shape[3] == width else functional.pad(turned, (0, width - x.shape[3]))


def without_chunks(dispatch: Dispatch, positions: int) -> Dispatch:
    """The same for texts of up to so many positions: one chunk, or one window, may hold them."""
    reach = dispatch.reach
    whole = (reach.chunk or positions + 1) if reach.window is None else reach.window
    if reach != Reach() and whole >= positions:
        return replace(dispatch, reach=Reach())
    return dispatch
