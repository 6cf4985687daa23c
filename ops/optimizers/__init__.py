"""Optimizers on flat buckets: parameters, gradients and moments of one length, each read and written once.

A parameter takes 28 bytes of AdamW in float32, 26 with gradients in bfloat16, 20 of Lion and of SGD with momentum. Kernels load
128 bits at a time where a bucket is a multiple of 16 elements long. They compute in at least float32; on a GPU a result may be off
by 4 roundings, since products and sums are fused and roots approximated; interpreted, they give the reference's bits.

Numbers may be tensors on the bucket's device, so that nothing waits for it. Those that change from step to step are given as they
are: the rate, and the powers b1^t and b2^t.
"""
from typing import Any

import torch
from torch import Tensor

from ..interpret import interpreting
from ..op import Op, bare, of_kernel, op
from . import reference

Number = float | Tensor


def _op(name: str, arguments: str, results: int) -> Op:
    """The op of a reference and the kernel of its name; derivatives are the reference's."""
    outputs = ", ".join(["Tensor"] * results)
    return op(f"{name}({arguments}) -> ({outputs})", getattr(reference, name), of_kernel(__package__, name))


_ADAMW = _op(
    "adamw", "Tensor p, Tensor g, Tensor mu, Tensor nu, Tensor numbers, Tensor? ends, Tensor? decays, Tensor? key, int start", 3)
_LION = _op("lion", "Tensor p, Tensor g, Tensor mu, Tensor numbers, Tensor? ends, Tensor? decays, Tensor? key, int start", 2)
_SGD = _op("sgd_momentum", "Tensor p, Tensor g, Tensor trace, Tensor numbers, Tensor? key, int start, bool nesterov", 2)


def adamw(
    p: Tensor, g: Tensor, mu: Tensor, nu: Tensor, *, rate: Number, power1: Number, power2: Number, b1: Number = 0.9,
    b2: Number = 0.999, eps: Number = 1e-8, weight_decay: Number = 0.0, scale: Number = 1.0, ends: Tensor | None = None,
    decays: Tensor | None = None, key: Tensor | None = None, start: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW; Adam without decay.

        mu = b1 mu + (1 - b1) scale g;    nu = b2 nu + (1 - b2) (scale g)^2
        p = (1 - rate weight_decay decays[s]) p - rate mu / (1 - power1) / (sqrt(nu / (1 - power2)) + eps)

    Args:
        p, g, mu, nu: buckets of one shape, each float32, bfloat16 or float64.
        rate: the learning rate.
        power1, power2: b1^t and b2^t at the t-th update, t from 1, best in float64.
        b1, b2, eps, weight_decay: as for `fspeed.optim.adamw`.
        scale: of the gradients: what `unscale_clip` says, so that they need no pass of their own.
        ends: int64 (segments,), where each segment of the bucket ends, ascending. None is one segment.
        decays: float32 (segments,), by which the decay of each is multiplied: 0 is none. None is 1 for all.
        key: int32 (2,): parameters in bfloat16 are rounded up or down by 16 random bits, of their position and the key, so that
            small updates are not lost. None rounds to nearest.
        start: the position of the bucket's first element, a multiple of 4.

    Returns:
        New p, mu and nu, in their dtypes.

    Cost: 28 bytes a parameter in float32.

    Source: Loshchilov and Hutter, arXiv 1711.05101; the rounding: Gupta et al., arXiv 1502.02551.

    >>> p, zero = torch.tensor([1., 1.]), torch.zeros(2)
    >>> adamw(p, torch.tensor([2., -.1]), zero, zero, rate=.1, power1=.9, power2=.999, weight_decay=.5)[0]
    tensor([0.8500, 1.0500])
    """
    numbers = adam_numbers(p, rate, power1, power2, b1, b2, eps, weight_decay, scale)
    return _ADAMW(p, g, mu, nu, numbers, ends, decays, key, aligned(start))


def lion(
    p: Tensor, g: Tensor, mu: Tensor, *, rate: Number, b1: Number = 0.9, b2: Number = 0.99, weight_decay: Number = 0.0,
    scale: Number = 1.0, ends: Tensor | None = None, decays: Tensor | None = None, key: Tensor | None = None, start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Lion.

        p = (1 - rate weight_decay decays[s]) p - rate sign(b1 mu + (1 - b1) scale g);    mu = b2 mu + (1 - b2) scale g

    Args:
        p, g, mu: buckets of one shape.
        rate, b1, b2, weight_decay: as for `fspeed.optim.lion`.
        scale, ends, decays, key, start: as for `adamw`.

    Returns:
        New p and mu, in their dtypes.

    Cost: 20 bytes a parameter in float32.

    Source: Chen et al., arXiv 2302.06675.

    >>> lion(torch.ones(2), torch.tensor([2., -.1]), torch.zeros(2), rate=.1)[0]
    tensor([0.9000, 1.1000])
    """
    return _LION(p, g, mu, _lion_numbers(p, rate, b1, b2, weight_decay, scale), ends, decays, key, aligned(start))


def sgd_momentum(
    p: Tensor, g: Tensor, trace: Tensor, *, rate: Number, momentum: Number = 0.9, nesterov: bool = False, scale: Number = 1.0,
    key: Tensor | None = None, start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Gradient descent with momentum.

        t = scale g + momentum t;    p = p - rate t;    nesterov: scale g + momentum t in place of t

    Args:
        p, g, trace: buckets of one shape.
        rate, momentum, nesterov: as for `fspeed.optim.sgd`.
        scale, key, start: as for `adamw`.

    Returns:
        New p and trace, in their dtypes.

    Cost: 20 bytes a parameter in float32.

    Source: Sutskever et al., proceedings.mlr.press/v28/sutskever13.

    >>> sgd_momentum(torch.ones(2), torch.tensor([2., -.1]), torch.ones(2), rate=.1)
    (tensor([0.7100, 0.9200]), tensor([2.9000, 0.8000]))
    """
    return _SGD(p, g, trace, vector((momentum, rate, scale), p), key, aligned(start), nesterov)


# ---------------------------------------------------------------- in place
def adamw_(
    p: Tensor, g: Tensor, mu: Tensor, nu: Tensor, *, rate: Number, power1: Number, power2: Number, b1: Number = 0.9,
    b2: Number = 0.999, eps: Number = 1e-8, weight_decay: Number = 0.0, scale: Number = 1.0, ends: Tensor | None = None,
    decays: Tensor | None = None, key: Tensor | None = None, start: int = 0, copy: Tensor | None = None,
) -> None:
    """`adamw` that writes over p, mu and nu, which are contiguous, and writes p into `copy` too, in the copy's dtype.

    >>> p, mu, nu = torch.ones(2), torch.zeros(2), torch.zeros(2)
    >>> adamw_(p, torch.tensor([2., -.1]), mu, nu, rate=.1, power1=.9, power2=.999)
    >>> p
    tensor([0.9000, 1.1000])
    """
    numbers = adam_numbers(p, rate, power1, power2, b1, b2, eps, weight_decay, scale)
    write(_ADAMW, (p, g, mu, nu, numbers, ends, decays, key, aligned(start)), (p, mu, nu), copy)


def lion_(
    p: Tensor, g: Tensor, mu: Tensor, *, rate: Number, b1: Number = 0.9, b2: Number = 0.99, weight_decay: Number = 0.0,
    scale: Number = 1.0, ends: Tensor | None = None, decays: Tensor | None = None, key: Tensor | None = None, start: int = 0,
    copy: Tensor | None = None,
) -> None:
    """`lion` that writes over p and mu, which are contiguous, and writes p into `copy` too, in the copy's dtype.

    >>> p, copy = torch.ones(2), torch.zeros(2, dtype=torch.bfloat16)
    >>> lion_(p, torch.tensor([2., -.1]), torch.zeros(2), rate=.1, copy=copy)
    >>> copy
    tensor([0.8984, 1.1016], dtype=torch.bfloat16)
    """
    numbers = _lion_numbers(p, rate, b1, b2, weight_decay, scale)
    write(_LION, (p, g, mu, numbers, ends, decays, key, aligned(start)), (p, mu), copy)


def sgd_momentum_(
    p: Tensor, g: Tensor, trace: Tensor, *, rate: Number, momentum: Number = 0.9, nesterov: bool = False, scale: Number = 1.0,
    key: Tensor | None = None, start: int = 0, copy: Tensor | None = None,
) -> None:
    """`sgd_momentum` that writes over p and trace, which are contiguous, and writes p into `copy` too, in the copy's dtype.

    >>> p, trace = torch.ones(2), torch.ones(2)
    >>> sgd_momentum_(p, torch.tensor([2., -.1]), trace, rate=.1)
    >>> p, trace
    (tensor([0.7100, 0.9200]), tensor([2.9000, 0.8000]))
    """
    write(_SGD, (p, g, trace, vector((momentum, rate, scale), p), key, aligned(start), nesterov), (p, trace), copy)


def write(op: Op, args: tuple, into: tuple[Tensor, ...], copy: Tensor | None = None) -> tuple[Tensor, ...]:
    """What an op makes of the arguments, its first results written over those that they replace."""
    if gaps := [x.stride() for x in (*into, copy) if x is not None and not x.is_contiguous()]:
        raise ValueError(f"{op.name}_ writes over contiguous buckets, and one has strides {gaps[0]}: give its contiguous copy")
    if into[0].is_cuda or interpreting():
        return bare(lambda *args: op.cuda(*args, into=into, copy=copy), args)
    out = bare(op.cpu, args)
    out = out if isinstance(out, tuple) else (out,)
    for old, new in zip(into, out, strict=False):
        old.copy_(new)
    if copy is not None:
        copy.copy_(into[0])
    return out


# ---------------------------------------------------------------- numbers
def adam_numbers(
    p: Tensor, rate: Any, power1: Any, power2: Any, b1: Any, b2: Any, eps: Any, weight_decay: Any, scale: Any,
) -> Tensor:
    """With the corrections of bias in the rate and in eps, so that an element needs none."""
    root2 = (1 - power2) ** 0.5
    return vector((b1, 1 - b1, b2, 1 - b2, rate * (root2 / (1 - power1)), eps * root2, rate * weight_decay, scale), p)


def _lion_numbers(p: Tensor, rate: Any, b1: Any, b2: Any, weight_decay: Any, scale: Any) -> Tensor:
    return vector((b1, 1 - b1, b2, 1 - b2, rate, rate * weight_decay, scale), p)


def vector(numbers: tuple, like: Tensor) -> Tensor:
    """Numbers as kernels take them: one vector on the bucket's device, in the dtype that it is computed in."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if not any(isinstance(x, Tensor) for x in numbers):
        made = torch.tensor(numbers, dtype=dtype)
        return made.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else made
    return torch.stack([torch.as_tensor(x, dtype=dtype, device=like.device) for x in numbers])


def aligned(start: int) -> int:
    if start % 4:
        raise ValueError(f"start must be a multiple of 4, since 4 positions share a hash, and is {start}")
    return start
