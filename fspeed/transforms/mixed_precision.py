"""Mixed precision: computing in a short dtype, with float32 masters and accumulators and, for fp16, a dynamic loss scale."""
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.grad import in_torch_func, in_trace
from fspeed.opened import Opened
from fspeed.shard.piece import at_least_float32, live, replace_live
from fspeed.shard.pytree import tree_flatten, tree_map, tree_unflatten
from fspeed.step import Batch, Grads, State, Step, Update, on_loss, outside, placed
from fspeed.transforms._guard import guarded

EXTRA = "loss_scale"


class LossScaling(NamedTuple):
    """How a dynamic loss scale moves: it grows after `window` good steps, and shrinks when `hysteresis` steps overflowed.

    Args:
        initial, floor: where it starts, and where it stops shrinking.
        factor: by which it grows and shrinks.
        window: steps without overflow after which it grows.
        hysteresis: it shrinks at the overflow that finds this counter at 1; every other one lowers the counter.
        consecutive_hysteresis: whether every good step refills the counter, not only growth.
        patience: overflows in a row at the floor after which a step raises.

    >>> LossScaling(initial=8., window=2).start().scale
    tensor(8.)
    """
    initial: float = 2.0**16
    factor: float = 2.0
    window: int = 1000
    hysteresis: int = 2
    floor: float = 1.0
    consecutive_hysteresis: bool = False
    patience: int = 100

    def start(self) -> "LossScale":
        count = lambda n: torch.tensor(n, dtype=torch.int64)
        return LossScale(torch.tensor(float(self.initial), dtype=torch.float32), count(0), count(self.hysteresis), count(0))

    def next(self, s: "LossScale", ok: Tensor) -> "LossScale":
        """The scale after a step; `ok`: whether its gradients were finite."""
        grow = ok & (s.good + 1 >= self.window)
        shrink = ~ok & (s.hysteresis <= 1)
        lower = (s.scale / self.factor).clamp(min=self.floor)
        refill = grow | ok if self.consecutive_hysteresis else grow
        return LossScale(
            torch.where(grow, s.scale * self.factor, torch.where(shrink, lower, s.scale)),
            torch.where(ok & ~grow, s.good + 1, 0),
            torch.where(refill, self.hysteresis, torch.where(ok | shrink, s.hysteresis, s.hysteresis - 1)),
            torch.where(~ok & (s.scale <= self.floor), s.stuck + 1, 0),
        )


class LossScale(NamedTuple):
    """Where a loss scale stands: it is `state.extra["loss_scale"]`."""
    scale: Tensor
    good: Tensor            # steps since the last overflow or growth
    hysteresis: Tensor      # overflows left before it shrinks, plus one
    stuck: Tensor           # overflows in a row at the floor


def mixed_precision(
    step: Step, compute: torch.dtype = torch.bfloat16, *, reduce: torch.dtype = torch.float32,
    loss_scaling: LossScaling | None = None,
) -> Step:
    """Same in and out as the step, computed in a short dtype; parameters, moments and accumulators are float32.

        g = d loss(params.to(compute)) / d params;    a step whose gradients overflow is skipped

    Args:
        step: a step.
        compute: torch.bfloat16 or torch.float16: what parameters, and floating leaves of the batch, are cast to for the loss.
        reduce: the dtype in which gradients are summed over ranks.
        loss_scaling: how the loss scale moves; by default none for bfloat16 and `LossScaling()` for float16.

    Returns:
        A step whose metrics have `skipped`, and `loss_scale` if there is one. `fs.mean` sums in float32.

    Raises:
        TypeError: `compute` or `reduce` is no floating dtype.
        FloatingPointError: when called: gradients overflow again and again at the floor of the loss scale.

    Cost: one cast a use of a group. Outside `zero_shard`, groups are gathered in `compute`; inside it, in float32.

    Source: Micikevicius et al., arXiv 1710.03740.

    >>> from fspeed import optim
    >>> from fspeed.loss import mean
    >>> from fspeed.step import step
    >>> s = mixed_precision(step(lambda p, batch, key: mean(p["w"] * batch), optim.sgd(1.)), torch.bfloat16)
    >>> s.params(s(s.init({"w": torch.tensor(0.)}), torch.tensor([1., 3.]))[0])
    {'w': tensor(-2.)}
    """
    for name, dtype in (("compute", compute), ("reduce", reduce)):
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"mixed_precision: {name} must be a floating torch.dtype, such as torch.bfloat16; got {dtype!r}")
    scaling = loss_scaling or (LossScaling() if compute == torch.float16 else None)
    cast = lambda tree: tree_map(lambda x: x.to(compute) if x.is_floating_point() else x, tree)

    def view(name: str, group: Any):
        dtypes = [x.dtype for x in live(group)]
        return cast(group), lambda grads: retyped(grads, dtypes)

    def prepared(loss: Opened) -> Opened:
        return replace(loss.through(view), prepare=lambda batch: loss.prepare(cast(batch)))

    low = outside(
        step, on_loss(prepared), reduce=reduce, update=lambda apply: step.update(guarded(apply)),
        place=placed(step, "float32 masters", lambda name, group: masters(group)),
    )
    return low if scaling is None else scaled(low, scaling)


def masters(group: Any) -> Any:
    """A group whose trained leaves are at least float32."""
    return replace_live(group, [x.to(at_least_float32(x.dtype)) if x.is_floating_point() else x for x in live(group)])


def retyped(grads: Any, dtypes: list[torch.dtype]) -> Any:
    """Gradients in the dtypes of what they are gradients of."""
    leaves, spec = tree_flatten(grads)
    return tree_unflatten(spec, [g.to(dtype) for g, dtype in zip(leaves, dtypes, strict=True)])


def scaled(step: Step, scaling: LossScaling) -> Step:
    """The step with backward started from the loss scale, and the scale moved by whether the update was skipped."""
    def wrap(inner: Grads) -> Grads:
        def run(loss: Opened, state: State, batch: Batch):
            scale = state.extra[EXTRA].scale
            metrics, grads = inner(loss.scaled(scale), state, batch)
            return metrics, tree_map(lambda g: g.to(at_least_float32(g.dtype)) / scale, grads)

        return run

    def update(apply: Update) -> Update:
        inner = step.update(apply)

        def run(grads: Any, state: State):
            new, metrics = inner(grads, state)
            scale = scaling.next(state.extra[EXTRA], metrics["skipped"] == 0)
            if not (in_torch_func() or in_trace()) and int(scale.stuck) > scaling.patience:
                raise FloatingPointError(
                    f"gradients overflowed in {scaling.patience} steps in a row with the loss scale at its floor, {scaling.floor}: "
                    "the loss itself is not finite; look at the data and the learning rate, or compute in bfloat16"
                )
            return new._replace(extra={**new.extra, EXTRA: scale}), {**metrics, "loss_scale": scale.scale}

        return run

    return outside(step, wrap, update=update, extra=(*step.extra, (EXTRA, lambda params: scaling.start())))
