"""Steps whose gradients overflow are skipped, on every rank."""
from dataclasses import replace

from fspeed.step import Step
from fspeed.transforms._guard import guarded


def skip_nonfinite(step: Step) -> Step:
    """Same in and out as the step; where a gradient on any rank is inf or NaN, params and opt_state stay as they were.

    `state.step` counts the call; what counts updates (moments, schedules) does not. The metrics say `skipped`: 0 or 1.

    Args:
        step: a step.

    Returns:
        A step whose metrics have `skipped`.

    Cost: one read of the gradients and one number summed over every mesh axis.

    >>> import torch
    >>> from fspeed import optim
    >>> from fspeed.loss import mean
    >>> from fspeed.step import step
    >>> s = skip_nonfinite(step(lambda p, batch, key: mean(p["w"] * batch), optim.sgd(1.)))
    >>> state, metrics = s(s.init({"w": torch.tensor(0.)}), torch.tensor([1., float("inf")]))
    >>> s.params(state), metrics["skipped"]
    ({'w': tensor(0.)}, tensor(1.))
    """
    return replace(step, update=lambda apply: step.update(guarded(apply)))
