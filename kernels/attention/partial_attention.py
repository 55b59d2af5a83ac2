"""Attention to some of the keys at a time: torch's flash attention, and the merge of its parts.

Each part comes with the logarithms of its softmax's sums, by which parts over disjoint keys are
weighted together: the result is that of one softmax over all (Milakov and Gimelshein 2018).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

_aten = torch.ops.aten


class Part(NamedTuple):
    """What queries found in some keys."""

    #: [N, H, n, V]
    out: torch.Tensor
    #: [N, H, n] float32: logarithms of the sums of exponentials.
    log_sums: torch.Tensor


def attend_part(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Part:
    """Softmax(q · kᵀ · scale) · v, with its sums.

    Args:
        q: [N, H, n, D], on a CPU or a GPU.
        keys: [N, H, m, D].
        values: [N, H, m, V]; on a GPU V is D.
        causal: query i sees keys 0 to i.
        mask: [n, m] in q's dtype, added to the products; on a CPU alone.
        scale: of the products; None: D ** -0.5.
    """
    if q.device.type == "cpu":
        width, most = values.shape[-1], max(q.shape[-1], values.shape[-1])
        if q.shape[-1] != width:  # torch has heads of one size alone
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            q, keys, values = (pad(x, (0, most - x.shape[-1])) for x in (q, keys, values))
        flash = _aten._scaled_dot_product_flash_attention_for_cpu.default
        found = flash(q, keys, values, is_causal=causal, attn_mask=mask, scale=scale)
        return Part(found[0][..., :width], found[1])
    if q.dtype == torch.float32:  # for which there is no other on a GPU; sums are padded
        efficient = _aten._scaled_dot_product_efficient_attention.default
        found = efficient(q, keys, values, None, True, 0.0, causal, scale=scale)
        return Part(found[0], found[1][..., : q.shape[2]])
    flash = _aten._scaled_dot_product_flash_attention.default
    return Part(*flash(q, keys, values, 0.0, causal, scale=scale)[:2])


def merged(one: Part, other: Part) -> Part:
    """What queries found in the keys of both. Results are of the first one's dtype."""
    share = torch.sigmoid(other.log_sums - one.log_sums).unsqueeze(-1)
    out = torch.lerp(one.out, other.out.to(one.out.dtype), share.to(one.out.dtype))
    return Part(out, torch.logaddexp(one.log_sums, other.log_sums))
