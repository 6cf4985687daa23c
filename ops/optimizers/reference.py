"""Optimizers in plain tensor operations, in at least float32; what a bucket stores is rounded to nearest, or by a key."""
import torch
from torch import Tensor

from ..threefry.reference import pairs


def adamw(
    p: Tensor, g: Tensor, mu: Tensor, nu: Tensor, numbers: Tensor, ends: Tensor | None, decays: Tensor | None, key: Tensor | None,
    start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    b1, a1, b2, a2, rate, eps, decay, scale = each(numbers)
    g = scale * wide(g)
    m, n = b1 * wide(mu) + a1 * g, b2 * wide(nu) + a2 * g * g
    new = shrink(p, decay, ends, decays) * wide(p) - rate * m / (n.sqrt() + eps)
    return stored(new, p, key, start), m.to(mu.dtype), n.to(nu.dtype)


def lion(
    p: Tensor, g: Tensor, mu: Tensor, numbers: Tensor, ends: Tensor | None, decays: Tensor | None, key: Tensor | None, start: int,
) -> tuple[Tensor, Tensor]:
    b1, a1, b2, a2, rate, decay, scale = each(numbers)
    g, m = scale * wide(g), wide(mu)
    new = shrink(p, decay, ends, decays) * wide(p) - rate * torch.sgn(a1 * g + b1 * m)
    return stored(new, p, key, start), (b2 * m + a2 * g).to(mu.dtype)


def sgd_momentum(
    p: Tensor, g: Tensor, trace: Tensor, numbers: Tensor, key: Tensor | None, start: int, nesterov: bool,
) -> tuple[Tensor, Tensor]:
    decay, rate, scale = each(numbers)
    g = scale * wide(g)
    t = g + decay * wide(trace)
    kept = 1 * wide(p)          # a gradient that is the result's own may not leave an op as it came
    return stored(kept - rate * (g + decay * t if nesterov else t), p, key, start), t.to(trace.dtype)


# ---------------------------------------------------------------- what they share
def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def each(numbers: Tensor) -> list[Tensor]:
    return [wide(numbers)[i] for i in range(len(numbers))]


def shrink(p: Tensor, decay: Tensor, ends: Tensor | None, decays: Tensor | None) -> Tensor:
    return 1 - decay if decays is None else 1 - decay * of_segment(ends, decays, p)


def of_segment(ends: Tensor | None, values: Tensor, like: Tensor) -> Tensor:
    """The value of each element's segment, in the shape of the elements."""
    if ends is None:
        raise ValueError("values of segments came without their ends: give ends, int64 (segments,), where each segment ends")
    return wide(values)[segments(ends, like)]


def segments(ends: Tensor, like: Tensor) -> Tensor:
    """The segment of each element; elements behind the last end are in the last."""
    at = torch.arange(like.numel(), device=like.device)
    return torch.searchsorted(ends, at, right=True).clamp(max=len(ends) - 1).reshape(like.shape)


def stored(x: Tensor, like: Tensor, key: Tensor | None, start: int) -> Tensor:
    """x in a bucket's dtype."""
    by_key = key is not None and like.dtype == torch.bfloat16
    return round_by_key(x, key, start) if by_key else x.to(like.dtype)


def round_by_key(x: Tensor, key: Tensor | None, start: int) -> Tensor:
    """x in bfloat16, rounded up with the probability that leaves its mean; derivatives are those of rounding to nearest."""
    bits = x.detach().to(torch.float32).view(torch.int32)
    draws = draws16(key, start, x.numel()).reshape(x.shape)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = (torch.where(finite, bits + draws, bits) & -0x10000).view(torch.float32).to(torch.bfloat16)
    nearest = x.to(torch.bfloat16)
    return torch.where(finite & (rounded != nearest), nearest + (rounded - nearest.detach()), nearest)


def draws16(key: Tensor | None, start: int, n: int) -> Tensor:
    """16 random bits for each position from start on: a quarter of the 64 that threefry makes at the counter position // 4."""
    first, ahead = divmod(start, 4)
    words = pairs(key, first, -(-(ahead + n) // 4)).reshape(-1)                  # type: ignore[arg-type]
    return torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF], -1).reshape(-1)[ahead : ahead + n]
