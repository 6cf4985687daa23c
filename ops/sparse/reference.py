"""Attention under a layout in plain operations, all scores at once: what is right, derivatives of any order included."""
import torch
from torch import Tensor

from ..threefry.reference import uniform
from .layout import visible


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, padding: Tensor | None, key: Tensor | None, start: Tensor, full: Tensor,
    index: Tensor, mask: Tensor, column_start: Tensor, column_full: Tensor, column_index: Tensor, column_mask: Tensor,
    masks: Tensor, causal: bool, scale: float, rate: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse): softmax over what is seen; out is 0 and lse -inf in rows that see nothing. lse has no derivative.

    key is int32 (2 + batch,): a key's words, and each row's place in the whole batch.
    """
    (batch, heads, Nq, _), (_, few, Nk, _), wide = q.shape, k.shape, accumulator(q.dtype)
    seen = visible(start, index, mask, masks, heads_of(full, Nq, masks), (Nq, Nk))
    if causal:
        seen = seen & torch.ones(Nq, Nk, dtype=torch.bool, device=q.device).tril(Nk - Nq)
    if padding is not None:
        seen = seen & padding[:, None, None, :]
    K, V = (x.to(wide).repeat_interleave(heads // few, 1) for x in (k, v))
    x = q.to(wide) @ K.mT * scale
    if bias is not None:
        x = x + bias.to(wide)
    top = x.detach().masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    p = (x - top).masked_fill(~seen, -torch.inf).exp()
    total = p.sum(-1, keepdim=True)
    lse = (total.log() + top).squeeze(-1).detach()
    p = p / total.masked_fill(total == 0, 1)
    if key is not None and rate > 0:
        size = heads * Nq * Nk
        draws = uniform(key[:2], key[2:].long() * size, size).view(batch, heads, Nq, Nk)
        p = torch.where(draws < 1 - rate, p, 0) / (1 - rate or 1.)
    return (p @ V).to(q.dtype), lse


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def heads_of(full: Tensor, Nq: int, masks: Tensor) -> int:
    """Of how many heads a layout's rows are."""
    return len(full) // -(-Nq // masks.shape[-1])
