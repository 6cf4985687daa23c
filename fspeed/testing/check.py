"""Laws of transforms, checked: any transform, in any stack, on any split, gives the same answer."""
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor

from fspeed import optim, random
from fspeed.shard.pytree import tree_leaves, tree_map, tree_paths, tree_structure
from fspeed.step import Step
from fspeed.step import step as make_step
from fspeed.testing.pool import mesh, ranks
from fspeed.testing.problem import Problem, problem
from fspeed.testing.stacks import PRECISIONS, splits, stacked, stacks
from fspeed.tree import whole

ROWS, STEPS = 7, 3


def check_transform(
    transform: Callable[[Step], Step], *, ranks: int = 2, examples: int = 20, tolerance: float = 2e-5,
    problem: Problem | None = None,
) -> None:
    """Prove a transform: it is pure and stable, and in every stack of fspeed's own, at every place, it gives one answer.

        stack with transform (step) = transform (step)

    Args:
        transform: Step -> Step, over no mesh axis of its own.
        ranks: on how many ranks to try it; the reference is always one process.
        examples: how many drawn stacks and splits.
        tolerance: relative to the largest element of each leaf; sums are taken in another order on other splits.
        problem: what to train; by default a small language model with dropout and odd leaves.

    Raises:
        AssertionError: with the stack, the leaf's path and both values.

    >>> from dataclasses import replace
    >>> from fspeed.step import outside
    >>> from fspeed.shard.pytree import tree_map
    >>> def halved(step):
    ...     half = lambda g: tree_map(lambda x: x / 2, g)
    ...     return replace(step, update=lambda apply: step.update(lambda grads, state: apply(half(grads), state)))
    >>> check_transform(halved, ranks=1, examples=5)
    """
    name = getattr(transform, "__name__", "transform")
    more = {name: lambda step, mesh: transform(step)}

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(stacks(ranks, always=(name,)), splits(ROWS, ranks))
    def law(stack: tuple[str, ...], split: tuple[int, ...]) -> None:
        check_stack(stack, split, more=more, always=(name,), tolerance=tolerance, problem=problem)

    law()


def check_stack(
    stack: Sequence[str], split: Sequence[int], *, more: dict | None = None, always: Sequence[str] = (), tolerance: float = 2e-5,
    problem: Problem | None = None, optimizer: Any = None,
) -> None:
    """A stack on `len(split)` ranks, each with its rows of the batch, against the bare step in one process."""
    kept = [n for n in stack if n in PRECISIONS or n in always]
    args = (more, problem, optimizer)
    reference = ranks(1)(trajectory, kept, (ROWS,), *args)[0]
    got = ranks(len(split))(trajectory, tuple(stack), tuple(split), *args)
    if any(n in PRECISIONS for n in stack):
        tolerance = max(tolerance, 0.05)        # three roundings of 8 bits, summed in other orders
    where = f"stack {' > '.join(stack) or 'bare'} on rows {tuple(split)}"
    for rank, one in enumerate(got):
        assert_close(one, reference, tolerance, f"{where}, rank {rank}")


def trajectory(stack: Sequence[str], split: Sequence[int], more: dict | None, problem_: Problem | None, optimizer: Any) -> dict:
    """What some steps of a stack give on this rank."""
    p = problem_ or problem()
    step = make_step(p.loss, optimizer or optim.sgd(0.5), layers=p.layers, trainable=p.trainable)
    return followed(stacked(step, stack, mesh(data=len(split)), more), p, split, pure="donate" not in stack)


def followed(step: Step, problem: Problem, split: Sequence[int], pure: bool = True, part: int | None = None) -> dict:
    """What some steps on this rank's part of the rows give: metrics, and all of the state, whole.

    It checks that a step is pure and stable. The part is the rank's own by default.
    """
    part = dist.get_rank() if part is None else part
    state, metrics = step.init(problem.params, random.key(1)), []
    for i in range(STEPS):
        batch = tree_map(lambda x: x.split(list(split))[part], problem.batch(i, sum(split)))
        before = tree_map(torch.clone, state)
        after, m = step(state, batch)
        if pure:
            assert_equal(state, before, "the state that was passed in")
        assert_stable(before, after)
        metrics.append({k: v for k, v in m.items() if k != "skipped"})
        state = after
    kept = {"opt_state": whole(state.opt_state), "extra": whole(state.extra), "step": state.step}
    return {"metrics": metrics, "params": step.params(state), **kept}


def assert_close(got: Any, expected: Any, tolerance: float, where: str) -> None:
    """Raise with the leaf's path if two trees differ by more than tolerance times the largest element of a leaf."""
    for path, a, b in zip(tree_paths(expected), tree_leaves(got), tree_leaves(expected), strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise AssertionError(f"{where}: {path} is {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}")
        if not b.numel():
            continue
        wide = torch.promote_types(b.dtype, torch.float64)
        error, size = (a.to(wide) - b.to(wide)).abs().max(), b.to(wide).abs().max()
        if not error <= tolerance * size.clamp(min=1e-3):
            raise AssertionError(f"{where}: {path} is off by {float(error):.2e} of {float(size):.2e}: got {a}, expected {b}")


def assert_equal(got: Any, expected: Any, what: str) -> None:
    """Raise with the leaf's path if two trees are not bitwise equal."""
    for path, a, b in zip(tree_paths(expected), tree_leaves(got), tree_leaves(expected), strict=True):
        if not torch.equal(a, b):
            raise AssertionError(f"{what} changed at {path}: {b} became {a}")


def assert_stable(before: Any, after: Any) -> None:
    """Raise unless a step's state has the structure, dtypes and shapes of the one before."""
    if tree_structure(before) != tree_structure(after):
        raise AssertionError(f"the state's structure changed: {tree_structure(before)} became {tree_structure(after)}")
    form = lambda x: (x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else type(x)
    for path, a, b in zip(tree_paths(before), tree_leaves(before), tree_leaves(after), strict=True):
        if form(a) != form(b):
            raise AssertionError(f"the state's leaf {path} was {form(a)} and became {form(b)}")
