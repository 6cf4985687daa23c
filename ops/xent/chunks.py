"""A linear layer's logits, in chunks of tokens: what is wanted of one is taken while it is there; the next takes its place.

A chunk's gradient is dlogits = a e + b [target] + c / V with numbers a, b, c a token and e = exp(logits - their largest). So the
only work on a chunk but its three matrix products is e: a scales rows of x and of e W, b and c add rows of W and x.
"""
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .reference import accumulator, loss

Cotangents = Callable[[slice, Tensor], tuple[Tensor, Tensor, Tensor]]       # (tokens, their lse) -> of lse, picked, mean


class Chunks:
    """The chunked forms, from one device's `statistics(logits, targets)`, `exponentials_(logits)` and `pick(logits, targets)`."""

    def __init__(self, statistics: Callable, exponentials_: Callable, pick: Callable) -> None:
        self.rows, self.exponentials_, self.pick = statistics, exponentials_, pick

    def statistics(self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int) -> tuple[Tensor, ...]:
        """`reference.linear_statistics`."""
        flat, at = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        out = torch.empty(3, len(flat), dtype=accumulator(x.dtype), device=x.device)
        for some, logits in logits_of(flat, weight, bias, chunk):
            for whole, part in zip(out, self.rows(logits, at[some]), strict=True):
                whole[some] = part
        return tuple(t.clone().view(targets.shape) for t in out)

    def statistics_backward(self, grads: tuple, inputs: tuple, outputs: tuple) -> list[Tensor]:
        x, weight, bias, targets, chunk = inputs
        flat = [g.reshape(-1) for g in grads]
        found = self.gradients(x, weight, bias, targets, lambda some, lse: tuple(g[some] for g in flat), chunk)
        return found[2:]

    def sum(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, by: Tensor, label_smoothing: float, z_loss: float,
        chunk: int, gradients: bool,
    ) -> tuple[Tensor, ...]:
        """`reference.linear_sum`."""
        if not gradients:
            found: list[Tensor] = []
            lse, picked, mean = self.statistics(x, weight, bias, targets, chunk)
        else:
            each = cotangents(by, label_smoothing, z_loss)
            lse, picked, *found = self.gradients(x, weight, bias, targets, each, chunk)
            mean = mean_of(x, weight, bias).view(targets.shape) if label_smoothing else lse
        losses = loss(lse, picked, mean, label_smoothing, z_loss)
        return (losses * by).sum(), losses, *found, *(x.new_empty(0) for _ in range(3 - len(found)))

    def sum_backward(self, grads: tuple, inputs: tuple, outputs: tuple) -> list[Tensor]:
        """What forward found, times the cotangent; computed now where forward was not asked for it."""
        x, weight, bias, targets, by, label_smoothing, z_loss, chunk, known = inputs
        _, losses, *found = outputs
        g, = grads
        if known:
            found = [t * g.to(t.dtype) for t in found[: 2 + (bias is not None)]]
        else:
            found = self.gradients(x, weight, bias, targets, cotangents(by * g, label_smoothing, z_loss), chunk)[2:]
        return [*found, (losses * g).to(by.dtype)]

    def gradients(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, each: Cotangents, chunk: int,
    ) -> list[Tensor]:
        """lse and picked; and the gradients of x, weight and, where there is one, bias."""
        flat, at = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        width, dtype = len(weight), accumulator(x.dtype)
        lse, picked = (torch.empty(len(flat), dtype=dtype, device=x.device) for _ in range(2))
        dx, dweight = torch.empty_like(flat), torch.empty(weight.shape, dtype=dtype, device=x.device)
        dbias = torch.zeros(width, dtype=dtype, device=x.device)
        if not len(flat):
            dweight.zero_()
        for some, logits in logits_of(flat, weight, bias, chunk):
            inside = (at[some] >= 0) & (at[some] < width)
            target = torch.where(inside, at[some], 0)
            picked[some] = self.pick(logits, at[some])
            lse[some], scale = self.exponentials_(logits)
            g_lse, g_picked, g_mean = (g.to(dtype)[:, None] for g in each(some, lse[some]))
            a, b, c = g_lse * scale[:, None], g_picked * inside[:, None], g_mean / width
            dx[some] = torch.mm(logits, weight).mul_(a).addcmul_(weight[target], b.to(x.dtype))
            add_product(dweight, logits.T, (flat[some] * a).to(x.dtype), first=some.start == 0)
            dweight.index_add_(0, target, (flat[some] * b).to(dtype))
            if bias is not None:
                dbias += torch.mv(logits.T, a[:, 0].to(x.dtype))
                dbias.index_add_(0, target, b[:, 0]).add_(c.sum())
            if bool(c.any()):
                dx[some] += c.to(x.dtype) * weight.sum(0)
                dweight += (flat[some] * c).sum(0)
        out = [lse.view(targets.shape), picked.view(targets.shape), dx.view(x.shape), dweight.to(weight.dtype)]
        return out if bias is None else [*out, dbias.to(bias.dtype)]


def logits_of(x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of tokens, with their logits in one buffer."""
    buffer = x.new_empty(min(chunk, len(x)), len(weight))
    for start in range(0, len(x), chunk):
        rows = x[start : start + chunk]
        out = buffer[: len(rows)]
        yield slice(start, start + len(rows)), (
            torch.mm(rows, weight.T, out=out) if bias is None else torch.addmm(bias, rows, weight.T, out=out))


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a b; total = a b at first."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif first:
        total.copy_(torch.mm(a, b))
    else:
        total += torch.mm(a, b)


def mean_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The mean of each token's logits: those are linear in x."""
    dtype = accumulator(x.dtype)
    mean = x.reshape(-1, x.shape[-1]).to(dtype) @ weight.mean(0, dtype=dtype)
    return mean if bias is None else mean + bias.mean(dtype=dtype)


def cotangents(by: Tensor, label_smoothing: float, z_loss: float) -> Cotangents:
    """Of by * loss, in a token's lse, picked and mean."""
    flat = by.reshape(-1)
    return lambda some, lse: (
        flat[some] * (1 + 2 * z_loss * lse), flat[some] * (label_smoothing - 1), flat[some] * -label_smoothing)
