"""AdamW whose moments take 8 bits an element and 32 a block of 256: 16 bytes a parameter read and written in float32, not 28.

Codes are integers of a power, since Adam divides by the root of what may be a millionth of its block's largest:

    mu = sgn(c) (c / 127)^2 largest |mu|, c from -127 to 127;    nu = (c / 255)^4 largest nu, c from 0 to 255, 0 for 0 alone
"""
from typing import NamedTuple

import torch
from torch import Tensor

from ..op import of_kernel, op
from ..optimizers import Number, adam_numbers, aligned, write
from . import reference

ADAMW8BIT = op(
    "adamw8bit(Tensor p, Tensor g, Tensor mu, Tensor nu, Tensor mu_scale, Tensor nu_scale, Tensor numbers, Tensor? ends, "
    "Tensor? decays, Tensor? key, int start) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference.adamw8bit, of_kernel(__package__, "adamw8bit"))


class Moments8bit(NamedTuple):
    """Adam's moments: codes, int8 and uint8 of the bucket's shape, and scales, float32, one for each block of 256."""
    mu: Tensor
    nu: Tensor
    mu_scale: Tensor
    nu_scale: Tensor


def moments8bit(p: Tensor) -> Moments8bit:
    """Moments that are zero, for a bucket.

    >>> [x.dtype for x in moments8bit(torch.ones(3))]
    [torch.int8, torch.uint8, torch.float32, torch.float32]
    """
    scale = torch.zeros(-(-p.numel() // reference.BLOCK), dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
    return Moments8bit(torch.zeros_like(p, dtype=torch.int8), torch.zeros_like(p, dtype=torch.uint8), scale, scale.clone())


def adamw8bit(
    p: Tensor, g: Tensor, moments: Moments8bit, *, rate: Number, power1: Number, power2: Number, b1: Number = 0.9,
    b2: Number = 0.999, eps: Number = 1e-8, weight_decay: Number = 0.0, scale: Number = 1.0, ends: Tensor | None = None,
    decays: Tensor | None = None, key: Tensor | None = None, start: int = 0,
) -> tuple[Tensor, Moments8bit]:
    """`adamw` with moments of 8 bits: a step is of the new moments before they are rounded.

    Args:
        p, g: buckets of one shape, each float32, bfloat16 or float64.
        moments: as `moments8bit` makes them.
        rate, power1, power2, b1, b2, eps, weight_decay, scale, ends, decays, key, start: as for `adamw`.

    Returns:
        New p and moments. A block that meets inf or NaN has scales that are inf, and nothing in it is finite from then on.

    Cost: 16 bytes a parameter in float32.

    Source: Dettmers et al., arXiv 2110.02861, whose codes are of another form.

    >>> p = torch.tensor([1., 1.])
    >>> adamw8bit(p, torch.tensor([2., -.1]), moments8bit(p), rate=.1, power1=.9, power2=.999, weight_decay=.5)[0]
    tensor([0.8500, 1.0500])
    """
    numbers = adam_numbers(p, rate, power1, power2, b1, b2, eps, weight_decay, scale)
    p, *new = ADAMW8BIT(p, g, *moments, numbers, ends, decays, key, aligned(start))
    return p, Moments8bit(*new)


def adamw8bit_(
    p: Tensor, g: Tensor, moments: Moments8bit, *, rate: Number, power1: Number, power2: Number, b1: Number = 0.9,
    b2: Number = 0.999, eps: Number = 1e-8, weight_decay: Number = 0.0, scale: Number = 1.0, ends: Tensor | None = None,
    decays: Tensor | None = None, key: Tensor | None = None, start: int = 0, copy: Tensor | None = None,
) -> None:
    """`adamw8bit` that writes over p and moments, which are contiguous, and writes p into `copy` too, in the copy's dtype.

    >>> p = torch.tensor([1., 1.])
    >>> adamw8bit_(p, torch.tensor([2., -.1]), moments8bit(p), rate=.1, power1=.9, power2=.999)
    >>> p
    tensor([0.9000, 1.1000])
    """
    numbers = adam_numbers(p, rate, power1, power2, b1, b2, eps, weight_decay, scale)
    write(ADAMW8BIT, (p, g, *moments, numbers, ends, decays, key, aligned(start)), (p, *moments), copy)
