"""Rows of logits on the CPU, a few at a time, so that all passes but the first find them in the cache."""
from collections.abc import Iterator

import torch
from torch import Tensor

from .reference import accumulator

BLOCK = 1 << 18        # logits: 1 MB of float32, in the L2 cache


def statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.statistics`, without a copy of the logits."""
    rows, at = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    lse, mean = (torch.empty(len(rows), dtype=accumulator(logits.dtype)) for _ in range(2))
    for some in blocks(rows):
        block = rows[some].to(lse.dtype, copy=True)
        mean[some] = block.mean(-1)
        lse[some], _ = exponentials_(block)
    return lse.view(targets.shape), pick(rows, at).view(targets.shape), mean.view(targets.shape)


def statistics_backward(grads: tuple, inputs: tuple, outputs: tuple) -> tuple[Tensor]:
    """g_lse p + g_picked [target] + g_mean / V."""
    logits, targets = inputs
    width = logits.shape[-1]
    rows, out = logits.reshape(-1, width), torch.empty_like(logits, memory_format=torch.contiguous_format)
    flat, at = out.view(-1, width), targets.reshape(-1)
    g_lse, g_picked, g_mean, lse = (t.reshape(-1, 1) for t in (*grads, outputs[0]))
    smooth = bool(g_mean.any())
    for some in blocks(rows):
        block = torch.sub(rows[some], lse[some], out=flat[some] if logits.dtype == lse.dtype else None).exp_().mul_(g_lse[some])
        if smooth:
            block += g_mean[some] / width
        if block.dtype != out.dtype:
            flat[some] = block
    inside = (at >= 0) & (at < width)
    flat.scatter_add_(1, torch.where(inside, at, 0)[:, None], (g_picked * inside[:, None]).to(flat.dtype))
    return (out,)


def exponentials_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of each row (n, V), which becomes e, and the factor by which e is the softmax."""
    top, total = (torch.empty(len(logits), 1, dtype=accumulator(logits.dtype)) for _ in range(2))
    for some in blocks(logits):
        block = logits[some]
        highest = block.amax(-1, keepdim=True)
        top[some] = highest.masked_fill_(highest.isinf(), 0)
        block.sub_(highest).exp_()
        total[some] = block.sum(-1, keepdim=True, dtype=total.dtype)
    return (total.log() + top)[:, 0], total.reciprocal()[:, 0]


def pick(rows: Tensor, targets: Tensor) -> Tensor:
    """The logit of each row's target, 0 where that is another's."""
    inside = (targets >= 0) & (targets < rows.shape[-1])
    picked = rows.gather(1, torch.where(inside, targets, 0)[:, None])[:, 0]
    return picked.to(accumulator(rows.dtype)).masked_fill_(~inside, 0)


def blocks(rows: Tensor) -> Iterator[slice]:
    """Slices of a few rows."""
    height = max(1, BLOCK // rows.shape[-1])
    return (slice(start, start + height) for start in range(0, len(rows), height))
