"""What a loss returns: weighted sums, which add over microbatches, ranks and stages."""
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.shard.piece import is_gone
from fspeed.shard.pytree import tree_flatten, tree_leaves, tree_structure

BUFFERS = "buffers"


class Loss(NamedTuple):
    """A weighted sum and its weight; losses and metrics add, and the mean is taken once, of the whole batch.

        value = total / weight,    0 where weight is 0

    Args:
        total: the sum of all values, a 0-d tensor.
        weight: what it is divided by in the end, a 0-d tensor or a number: how many values there are.

    >>> a, b = Loss(torch.tensor(6.), torch.tensor(3.)), Loss(torch.tensor(4.), torch.tensor(1.))
    >>> Loss(a.total + b.total, a.weight + b.weight).value()
    tensor(2.5000)
    """
    total: Any
    weight: Any

    def value(self) -> Tensor:
        weight = torch.as_tensor(self.weight)
        return self.total / torch.where(weight == 0, torch.inf, weight)


def mean(values: Tensor, mask: Tensor | None = None) -> Loss:
    """The mean of values where the mask is on, as a `Loss`: right however the batch is split.

    Args:
        values: any shape, a floating dtype; summed in at least float32.
        mask: of the same shape, boolean or weights; all ones by default. Values under a zero are not looked at.

    Returns:
        Loss(sum of mask * values, sum of mask).

    >>> mean(torch.tensor([1., 3., 9.]), torch.tensor([True, True, False])).value()
    tensor(2.)
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    values = values.to(dtype)
    if mask is None:
        return Loss(values.sum(), torch.full((), values.numel(), dtype=dtype, device=values.device))
    if mask.shape != values.shape:
        shapes = f"values have shape {tuple(values.shape)}, the mask {tuple(mask.shape)}"
        raise ValueError(f"fs.mean: {shapes}; give them the same shape")
    mask = mask.to(dtype)
    return Loss(torch.where(mask == 0, 0, values * mask).sum(), mask.sum())


def as_metrics(out: Any, rows: Tensor, buffers: Any = (), weights: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """What a loss returned, as {"loss": Loss, name: Loss, ...}; new buffers as {"buffers": {place among the leaves: Loss}}.

    A bare scalar counts as the mean over its rows, a new buffer as the mean over the parts of the batch, weighted by rows.
    Given the weights of the whole batch, the loss is a dict of terms, each divided by its own.
    """
    loss, more, new = _parts(out)
    if not is_gone(buffers) and tree_structure(new) != tree_structure(buffers):
        raise TypeError(
            "a loss that is given buffers must return (loss, {name: fs.Loss}, buffers) with buffers of the same structure; "
            f"got {'a pair' if new is None else tree_structure(new)}, expected buffers of {tree_structure(buffers)}"
        )
    if taken := {"loss", BUFFERS} & more.keys():
        raise ValueError(f"a loss returned a metric named {min(taken)!r}; that name is the step's own: choose another")
    count = torch.full((), len(rows), dtype=torch.float32, device=rows.device)
    if weights is not None:
        terms: Any = loss
        loss, more = _terms(terms, weights, count), {**terms, **more}
    found = {name: _as_loss(name, x, count) for name, x in {"loss": loss, **more}.items()}
    if not found["loss"].total.is_floating_point():
        raise TypeError(f"the loss is of dtype {found['loss'].total.dtype}; only a real floating one has a gradient to train by")
    if is_gone(buffers):
        return found
    count = count.to(torch.float64)
    changed = enumerate(zip(tree_leaves(new), tree_leaves(buffers), strict=True))
    part = lambda b: Loss(torch.where(count == 0, 0, b.detach().to(torch.float64) * count), count)      # no rows say nothing
    return {**found, BUFFERS: {i: part(b) for i, (b, old) in changed if b is not old}}


ROWS = "rows"


def _terms(terms: Any, weights: dict[str, Tensor], count: Tensor) -> Loss:
    """The sum of terms, each over its weight in the whole batch; the parts of a batch weigh 1 together."""
    if not isinstance(terms, dict) or set(terms) != set(weights) - {ROWS}:
        got = sorted(terms) if isinstance(terms, dict) else f"a {type(terms).__name__}"
        raise TypeError(f"a loss under weights= must return {{name: fs.Loss}} for {sorted(set(weights) - {ROWS})}, got {got}")
    over = lambda x, weight: x / torch.where(weight == 0, torch.inf, weight)
    total = sum(over(_as_loss(name, terms[name], count).total, weights[name]) for name in terms)
    return Loss(total, over(count.to(torch.float64), weights[ROWS]))


def new_buffers(buffers: Any, metrics: dict[str, Any]) -> Any:
    """Buffers with those that were written replaced by their mean over all parts of the batch; taken out of the metrics."""
    leaves, spec = tree_flatten(buffers)
    for i, mean in metrics.pop(BUFFERS, {}).items():
        leaves[i] = torch.where(mean.weight == 0, leaves[i], mean.value().to(leaves[i].dtype))
    return spec.unflatten(leaves)


def _parts(out: Any) -> tuple[Any, dict, Any]:
    if isinstance(out, Loss) or not isinstance(out, tuple):
        return out, {}, None
    if len(out) in (2, 3) and isinstance(out[1], dict):
        return out[0], out[1], out[2] if len(out) == 3 else None
    raise TypeError(
        f"a loss returned a {type(out).__name__} of {len(out)}; expected fs.Loss, a scalar tensor, "
        "or (one of these, {name: fs.Loss}), and behind them the new buffers if it was given buffers"
    )


def _as_loss(name: str, x: Any, count: Tensor) -> Loss:
    if isinstance(x, Loss):
        total, weight = (torch.as_tensor(part, device=count.device) if isinstance(part, (int, float)) else part for part in x)
        if all(isinstance(part, Tensor) and part.dim() == 0 for part in (total, weight)):
            return Loss(total, weight)
        kinds = ", ".join(f"a tensor of shape {tuple(p.shape)}" if isinstance(p, Tensor) else f"a {type(p).__name__}" for p in x)
        raise TypeError(f"{name!r} is fs.Loss of {kinds}; both its total and its weight must be 0-d tensors: sums over the rows")
    if isinstance(x, Tensor) and x.dim() == 0:
        return Loss(torch.where(count == 0, 0, x * count), count)
    what = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
    raise TypeError(f"{name!r} must be an fs.Loss or a 0-d tensor, got {what}; fs.mean(values, mask) makes one of any shape")
