"""Cross entropy over a vocabulary: of logits, of a linear layer whose logits are never held, and of logits cut over ranks.

    loss = lse(l) - (1 - s) l[target] - s mean(l) + z lse(l)^2

with label smoothing s and z-loss z. A row's three numbers, lse, l[target] and mean, are the op; the rest is arithmetic on numbers a
token. So ranks that hold a part of the vocabulary each need no more than these numbers of one another.

Of V logits a token with D features, plain: 6 N V D FLOPs, and 3 N V numbers at the peak. In chunks there are three ways:

- the gradient with the loss, while a chunk's logits are there: 6 N V D, no logits held. The weights' gradient adds up tokens,
  so what each token counts must be known in forward: `linear_cross_entropy_sum` takes that as an argument, and its cotangent is
  a scalar.
- the logits again in backward: 8 N V D, a third more, and any cotangent a token: `linear_cross_entropy`.
- logits kept in fewer bits: other gradients, and 1/4 of the peak at best. Not done.
"""
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..op import Op, Paths, of_kernel, one_by_one, op
from . import cpu, reference
from .chunks import Chunks

LOGITS = 1 << 24       # in a chunk, by default: 64 MB of float32

Collective = Callable[[Tensor], Tensor]
in_chunks = Chunks(cpu.statistics, cpu.exponentials_, cpu.pick)
kernels = SimpleNamespace(**{name: of_kernel(__package__, name) for name in ("statistics", "exponentials_", "statistics_backward")})
kernels_in_chunks = Chunks(kernels.statistics, kernels.exponentials_, cpu.pick)


def rows_of(fn: Callable, rows: tuple[int, ...], size: int) -> Callable:
    """A vmap rule: one more dim in front of the tensors `rows`; the op on one of a batch after another where others have one."""
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
        if any(d is not None for i, d in enumerate(in_dims) if i not in rows):
            return one_by_one(fn)(info, in_dims, *args)
        moved = list(args)
        for i in rows:
            moved[i] = args[i].expand(info.batch_size, *args[i].shape) if in_dims[i] is None else args[i].movedim(in_dims[i], 0)
        return fn(*moved), (0,) * size

    return vmap


row_statistics: Op = op(
    "xent_statistics(Tensor logits, Tensor targets) -> (Tensor, Tensor, Tensor)", reference.statistics,
    cuda=kernels.statistics, cpu=cpu.statistics, backward=Paths(cpu.statistics_backward, kernels.statistics_backward),
    vmap=lambda *args: rows_of(row_statistics, (0, 1), 3)(*args))

linear_statistics: Op = op(
    "xent_linear_statistics(Tensor x, Tensor weight, Tensor? bias, Tensor targets, int chunk) -> (Tensor, Tensor, Tensor)",
    reference.linear_statistics, cuda=kernels_in_chunks.statistics, cpu=in_chunks.statistics,
    backward=Paths(in_chunks.statistics_backward, kernels_in_chunks.statistics_backward),
    vmap=lambda *args: rows_of(linear_statistics, (0, 3), 3)(*args))

linear_sum: Op = op(
    "xent_linear_sum(Tensor x, Tensor weight, Tensor? bias, Tensor targets, Tensor by, float label_smoothing, float z_loss, "
    "int chunk, bool gradients) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference.linear_sum, cuda=kernels_in_chunks.sum, cpu=in_chunks.sum, saves=4,
    backward=Paths(in_chunks.sum_backward, kernels_in_chunks.sum_backward),
    fake=reference.linear_sum_shapes, vmap=lambda *args: one_by_one(linear_sum)(*args))


def cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0., z_loss: float = 0., ignore_index: int = -100,
) -> Tensor:
    """Each token's cross entropy, 0 where its target is to be ignored.

        loss = lse(l) - (1 - s) l[target] - s mean(l) + z lse(l)^2

    Args:
        logits: (..., V), in floating point.
        targets: integers (...), in [0, V) or ignore_index. Another one gives NaN.
        label_smoothing: s in [0, 1].
        z_loss: z >= 0.
        ignore_index: the target of tokens that do not count.

    Returns: (...), in float32, or float64 for such logits.
    Raises: ValueError where shapes, dtypes or ranges are others.
    Cost: one pass over the logits; one in backward, which reads them and writes their gradient; nothing else of their size.

    >>> cross_entropy(torch.zeros(3, 4), torch.tensor([0, 3, -100]))
    tensor([1.3863, 1.3863, 0.0000])

    Source: C. Szegedy et al., arXiv 1512.00567 (label smoothing); A. Chowdhery et al., arXiv 2204.02311 (z-loss); M. Milakov,
    N. Gimelshein, arXiv 1805.02867 (log-sum-exp in one pass).
    """
    check("cross_entropy", "logits", logits, targets, label_smoothing)
    lse, picked, mean = row_statistics(logits, targets)
    losses = reference.loss(lse, picked, mean, label_smoothing, z_loss)
    return kept(losses, targets, logits.shape[-1], ignore_index)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, label_smoothing: float = 0., z_loss: float = 0.,
    ignore_index: int = -100, chunk: int | None = None,
) -> Tensor:
    """`cross_entropy(x W^T + b, targets)`, whose logits are never held: each token's loss, for any use of it.

    For a sum or mean `linear_cross_entropy_sum` is faster: it computes the logits once.

    Args:
        x: (..., D).
        weight: (V, D), in x's dtype.
        targets: integers (...), in [0, V) or ignore_index. Another one gives NaN.
        bias: (V,), or none.
        label_smoothing, z_loss, ignore_index: as in `cross_entropy`.
        chunk: how many tokens' logits there are at once; by default so many that these are about 2**24.

    Returns: (...), in float32, or float64 for such x.
    Raises: ValueError where shapes, dtypes or ranges are others.
    Cost: 2 N V D FLOPs, and 6 N V D in backward, where the logits are computed again; chunk V numbers held.

    >>> linear_cross_entropy(torch.zeros(3, 2), torch.ones(4, 2), torch.tensor([0, 3, -100]))
    tensor([1.3863, 1.3863, 0.0000])
    """
    check("linear_cross_entropy", "x", x, targets, label_smoothing)
    check_linear("linear_cross_entropy", x, weight, bias)
    lse, picked, mean = linear_statistics(x, weight, bias, targets, chunk or tokens(len(weight)))
    return kept(reference.loss(lse, picked, mean, label_smoothing, z_loss), targets, len(weight), ignore_index)


def linear_cross_entropy_sum(
    x: Tensor, weight: Tensor, targets: Tensor, by: Tensor | None = None, *, bias: Tensor | None = None,
    label_smoothing: float = 0., z_loss: float = 0., ignore_index: int = -100, chunk: int | None = None,
) -> Tensor:
    """sum(by * linear_cross_entropy(x, W, targets)), with the gradients computed while the logits are there.

    A mean is this over the sum of what counts; a loss of a step returns both, (total, weight).

    Args:
        x: (..., D).
        weight: (V, D), in x's dtype.
        targets: integers (...), in [0, V) or ignore_index. Another one gives NaN.
        by: (...), what each token counts; 1 by default. It has a gradient: the losses.
        bias: (V,), or none.
        label_smoothing, z_loss, ignore_index: as in `cross_entropy`.
        chunk: how many tokens' logits there are at once; by default so many that these are about 2**24.

    Returns: a number, in float32, or float64 for such x.
    Raises: ValueError where shapes, dtypes or ranges are others.
    Cost: 6 N V D FLOPs where a gradient is wanted (2 N V D if not), none of them in backward; chunk V numbers held, and gradients
        twice, as backward multiplies them by its cotangent.

    >>> linear_cross_entropy_sum(torch.zeros(3, 2), torch.ones(4, 2), torch.tensor([0, 3, -100]))
    tensor(2.7726)

    Source: P.-L. Hsu et al., arXiv 2410.10989 (gradients in forward).
    """
    check("linear_cross_entropy_sum", "x", x, targets, label_smoothing)
    check_linear("linear_cross_entropy_sum", x, weight, bias)
    ones = torch.ones(targets.shape, dtype=reference.accumulator(x.dtype), device=x.device)
    if by is not None and by.shape != targets.shape:
        raise ValueError(f"linear_cross_entropy_sum: by is {tuple(by.shape)}, and must be as the targets, {tuple(targets.shape)}")
    counted = kept(ones if by is None else by.to(ones.dtype), targets, len(weight), ignore_index)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    return linear_sum(
        x, weight, bias, targets, counted, float(label_smoothing), float(z_loss), chunk or tokens(len(weight)), wanted)[0]


def vocab_parallel_cross_entropy(
    local_logits: Tensor, targets: Tensor, offset: int, psum: Collective, pmax: Collective, *, label_smoothing: float = 0.,
    z_loss: float = 0., ignore_index: int = -100,
) -> Tensor:
    """`cross_entropy` of logits whose last dim is cut over ranks, on every rank.

    The collectives are true transposes, so a loss counts on each rank that returns it: summed over the ranks, that is the gradient
    of the sum of all ranks' losses, the size of the axis times one rank's.

    Args:
        local_logits: (..., V on this rank).
        targets: integers (...), in the whole vocabulary or ignore_index; alike on all ranks.
        offset: how many of the vocabulary are on the ranks before.
        psum, pmax: sum and maximum over the ranks, as `lambda x: fspeed.psum(x, axis)`.
        label_smoothing, z_loss, ignore_index: as in `cross_entropy`.

    Returns: (...), as `cross_entropy`, the same on all ranks.
    Raises: ValueError where shapes, dtypes or ranges are others.
    Cost: as `cross_entropy`, and five numbers a token over the wire in forward at the most, two in backward.

    >>> one = lambda x: x
    >>> vocab_parallel_cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]), 0, one, one)
    tensor([1.3863, 1.3863])

    Source: M. Shoeybi et al., arXiv 1909.08053, section 3.
    """
    check("vocab_parallel_cross_entropy", "local_logits", local_logits, targets, label_smoothing)
    found = row_statistics(local_logits, targets - offset)
    return joined(found, local_logits.shape[-1], targets, psum, pmax, label_smoothing, z_loss, ignore_index)


def vocab_parallel_linear_cross_entropy(
    x: Tensor, local_weight: Tensor, targets: Tensor, offset: int, psum: Collective, pmax: Collective, *,
    local_bias: Tensor | None = None, label_smoothing: float = 0., z_loss: float = 0., ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """`linear_cross_entropy` of a weight whose rows are cut over ranks, on every rank.

    Each rank's gradient of x is its part of the vocabulary's; the whole is their sum. How losses count is as in
    `vocab_parallel_cross_entropy`.

    Args:
        x: (..., D), alike on all ranks.
        local_weight, local_bias: (V on this rank, D), and (V on this rank,) or none.
        targets, offset, psum, pmax: as in `vocab_parallel_cross_entropy`.
        label_smoothing, z_loss, ignore_index: as in `cross_entropy`.
        chunk: as in `linear_cross_entropy`.

    Returns: (...), as `linear_cross_entropy`, the same on all ranks.
    Raises: ValueError where shapes, dtypes or ranges are others.
    Cost: as `linear_cross_entropy`, and what `vocab_parallel_cross_entropy` sends.

    >>> one = lambda x: x
    >>> vocab_parallel_linear_cross_entropy(torch.zeros(2, 3), torch.ones(4, 3), torch.tensor([0, 3]), 0, one, one)
    tensor([1.3863, 1.3863])
    """
    check("vocab_parallel_linear_cross_entropy", "x", x, targets, label_smoothing)
    check_linear("vocab_parallel_linear_cross_entropy", x, local_weight, local_bias)
    found = linear_statistics(x, local_weight, local_bias, targets - offset, chunk or tokens(len(local_weight)))
    return joined(found, len(local_weight), targets, psum, pmax, label_smoothing, z_loss, ignore_index)


def joined(
    found: tuple[Tensor, Tensor, Tensor], width: int, targets: Tensor, psum: Collective, pmax: Collective, label_smoothing: float,
    z_loss: float, ignore_index: int,
) -> Tensor:
    """The losses, from the numbers of each rank's part of a row."""
    lse, picked, mean = found
    top = pmax(lse.detach())
    lse = psum((lse - top).exp()).log() + top
    total = psum(torch.tensor(width, device=lse.device))
    mean = psum(mean * width) / total if label_smoothing else mean
    return kept(reference.loss(lse, psum(picked), mean, label_smoothing, z_loss), targets, total, ignore_index)


def kept(values: Tensor, targets: Tensor, width: int | Tensor, ignore_index: int) -> Tensor:
    """values, 0 where the target is ignored, and NaN where it is none."""
    wrong = (targets < 0) | (targets >= width)
    return values.masked_fill(wrong, torch.nan).masked_fill(targets == ignore_index, 0)


def tokens(width: int) -> int:
    """How many tokens a chunk has by default."""
    return max(1, LOGITS // width)


def check(name: str, what: str, x: Tensor, targets: Tensor, label_smoothing: float) -> None:
    if not x.is_floating_point() or targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"{name}: {what} of {x.dtype}, targets of {targets.dtype}; expected floats, and integers")
    if x.dim() < 1 or x.shape[:-1] != targets.shape:
        raise ValueError(f"{name}: {what} {tuple(x.shape)}, targets {tuple(targets.shape)}; expected {what}'s but the last dim")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing is {label_smoothing}, and must be in [0, 1]")


def check_linear(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.dtype != x.dtype:
        raise ValueError(f"{name}: weight {tuple(weight.shape)} of {weight.dtype}; expected (V, {x.shape[-1]}) of {x.dtype}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise ValueError(f"{name}: bias {tuple(bias.shape)} of {bias.dtype}; expected ({len(weight)},) of {x.dtype}")
