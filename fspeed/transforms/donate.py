"""Donation: the memory of the state that goes in becomes that of the state that comes out."""
from fspeed.step import Step
from fspeed.transforms._donated import donated


def donate(step: Step) -> Step:
    """Same in and out as the step, but the state that is passed in is used up: parameters and moments are updated in place.

    Args:
        step: a step.

    Returns:
        A step that holds one copy of parameters and moments at any time, if its optimizer updates in one pass.

    Raises:
        RuntimeError: when called with a state that was written over before.

    Cost: no copy of parameters and moments.

    >>> import torch
    >>> from fspeed import optim
    >>> from fspeed.loss import mean
    >>> from fspeed.step import step
    >>> s = donate(step(lambda p, batch, key: mean(p["w"] * batch), optim.adamw(1.)))
    >>> old = s.init({"w": torch.tensor(0.)})
    >>> new, _ = s(old, torch.tensor([1., 3.]))
    >>> s(old, torch.tensor([1., 3.]))
    Traceback (most recent call last):
      ...
    RuntimeError: this state was donated to a step, which wrote over it; use the state that the step returned
    """
    return donated(step)
