"""Attention over latent rows: what lies between the stream and the product that ends in it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import LatentPlan, Rotation
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.models.layer_spec import Latent
from tokenpod.models.linear import Product, Products

#: (x [T, in], step, pool, rotation, plan) -> [T, H · value].
Attend = Callable[[torch.Tensor, ForwardBatch, KVPool, Rotation, LatentPlan], torch.Tensor]


def make_latent(spec: Latent, products: Products, i: int, read: Product) -> Attend:
    """Layer `i`'s, whose first product is `read`: queries, or what they are made of, and rows."""
    ops, shape = products.ops, spec.shape
    query_dim, row_dim = spec.nope_dim + spec.rope_dim, spec.kv.key_dim
    norm = RowNorm(products.tensor(f"{i}.kv_norm"), spec.kv_norm.epsilon)
    up = products.tensor(f"{i}.kv_up").view(spec.heads, spec.nope_dim + spec.value_dim, -1)
    queries = _queries(spec, products, i)

    def attend(
        x: torch.Tensor, batch: ForwardBatch, pool: KVPool, rotation: Rotation, plan: LatentPlan
    ) -> torch.Tensor:
        made = read(x, batch)
        first, row = made[:, :-row_dim], made[:, -row_dim:]
        q = queries(first, batch).reshape(len(x), spec.heads, query_dim)
        rows = pool.keys[i]
        q = ops.store_latent(q, row, rotation, norm, rows, batch.t_slot)
        return ops.attend_latent(q, rows, up, shape, plan, spec.scale)

    return attend


def _queries(spec: Latent, products: Products, i: int) -> Product:
    """From what the first product says: the queries, or a vector that they are made of."""
    if spec.query_norm is None:
        return lambda x, step: x
    ops, product = products.ops, products.linear(f"{i}.q_up")
    weight, epsilon = products.tensor(f"{i}.query_norm"), spec.query_norm.epsilon
    return lambda x, step: product(ops.rms_norm(x.contiguous(), weight, epsilon), step)
