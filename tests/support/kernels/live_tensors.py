"""How many bytes of tensors there are at a time, counted operation by operation."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Within it: the most bytes of tensors, made since it was entered, that there were at a time.

    An operation's own working memory is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        live = {at: one for at, one in self._known.items() if not one[0].expired()}
        self._known = live
        self.most_bytes = max(self.most_bytes, sum(size for _, size in live.values()))
        return out


def _tensors(values: Any) -> list[torch.Tensor]:
    """Those with storage of their own kind; weights that a library has laid out have another."""
    leaves = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return [tensor for tensor in leaves if tensor.layout is torch.strided and not tensor.is_mkldnn]
