"""Chains: the updates of one transformation are what the next is given."""
from collections import OrderedDict
from typing import Any

from fspeed.optim.base import GradientTransformation


def chain(*args: GradientTransformation) -> GradientTransformation:
    """Transformations one after another; a chain is a transformation, so chains nest.

    Args:
        args: transformations; what has only init and update, like optax's, fits too.

    Returns:
        A transformation whose state is the tuple of theirs. It steps in one pass if its last one does: the others update.

    Raises:
        TypeError: an argument has no init and update, such as a list of transformations.

    >>> import torch
    >>> from fspeed.optim.scale import scale
    >>> opt = chain(scale(2.), scale(-.5))
    >>> opt.update(torch.tensor(3.), opt.init(torch.tensor(0.)))
    (tensor(-3.), (EmptyState(), EmptyState()))
    """
    for i, t in enumerate(args):
        if not (hasattr(t, "init") and hasattr(t, "update")):
            got = f"got a {type(t).__name__}; give chain(a, b), not a list"
            raise TypeError(f"chain: argument {i} must have init and update, {got}")

    def init(params: Any) -> tuple:
        return tuple(t.init(params) for t in args)

    def update(updates: Any, state: tuple, params: Any = None) -> tuple[Any, tuple]:
        return _through(args, updates, state, params)

    def apply(grads: Any, state: tuple, params: Any) -> tuple[Any, tuple]:
        _same_length(args, state)
        updates, new = _through(args[:-1], grads, state[:-1], params)
        params, last = args[-1].apply(updates, state[-1], params)      # type: ignore[misc]
        return params, (*new, last)

    return GradientTransformation(init, update, apply if args and getattr(args[-1], "apply", None) else None)


def named_chain(*args: tuple[str, GradientTransformation]) -> GradientTransformation:
    """A chain whose state is by name: an `OrderedDict`, in the order of the chain.

    Args:
        args: pairs of a name and a transformation.

    >>> from fspeed.optim.scale import scale
    >>> named_chain(("half", scale(.5))).init(None)["half"]
    EmptyState()
    """
    names = [name for name, _ in args]
    if len(set(names)) < len(names):
        raise ValueError(f"named_chain: each name may be given once, got {names}")
    inner = chain(*(t for _, t in args))
    named = lambda states: OrderedDict(zip(names, states, strict=True))

    def around(f: Any) -> Any:
        def run(x: Any, state: dict, params: Any = None) -> tuple[Any, dict]:
            out, new = f(x, tuple(state[n] for n in names), params)
            return out, named(new)

        return run

    return GradientTransformation(
        lambda params: named(inner.init(params)), around(inner.update), around(inner.apply) if inner.apply else None
    )


def _through(args: tuple, updates: Any, state: tuple, params: Any) -> tuple[Any, tuple]:
    _same_length(args, state)
    new = []
    for t, s in zip(args, state, strict=True):
        updates, s = t.update(updates, s, params)
        new.append(s)
    return updates, tuple(new)


def _same_length(args: tuple, state: tuple) -> None:
    if len(args) != len(state):
        raise ValueError(
            f"chain: a state of {len(state)} parts was given to a chain of {len(args)}: it is another optimizer's; "
            "make it by this one's init"
        )
