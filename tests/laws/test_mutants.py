"""Laws broken on purpose: each fault must be seen by them, under every transform that it touches."""
import contextlib
from dataclasses import replace
from unittest import mock

import pytest

from fspeed import optim, random
from fspeed.grad import in_backward
from fspeed.opened import Late, Opened, settled
from fspeed.shard import piece
from fspeed.shard.pytree import tree_map
from fspeed.step import Step, outside
from fspeed.testing import check_stack, ranks
from fspeed.testing.pool import RankError
from fspeed.testing.stacks import TRANSFORMS
from fspeed.transforms import _sums as sums_file
from fspeed.transforms import accumulate as accumulate_file
from fspeed.transforms import checkpoint as checkpoint_file
from fspeed.transforms._ahead import Ahead


def grads_times(factor):
    """A transform that is wrong by a constant: gradients off by a factor when on several ranks."""
    def wrap(step: Step, mesh) -> Step:
        off = factor if mesh.axis("data").size > 1 else 1.0

        def mutated(inner):
            def run(loss, state, batch):
                metrics, grads = inner(loss, state, batch)
                return metrics, tree_map(lambda g: g * off, grads)

            return run

        return outside(step, mutated)

    return wrap


def fails(stack, split=(5, 2), **kwargs):
    with pytest.raises(AssertionError, match="is off by"):
        check_stack(stack, split, **kwargs)


@pytest.mark.parametrize("name", [n for n in TRANSFORMS if n != "fp16"])
def test_a_gradient_off_by_a_twentieth_is_seen_under_every_transform(name):
    stack = (name, "mutant") if name.startswith(("data", "zero")) else ("zero2", name, "mutant")
    # short dtypes are compared at 5 percent, so the fault must be larger there
    fails(stack, more={"mutant": grads_times(1.05 if name != "bf16" else 1.5)})


def broken(target, attribute, fault):
    """Run a stack on ranks in which a function of the library is broken."""
    def enter():
        patch = mock.patch.object(target, attribute, fault(getattr(target, attribute)))
        patch.start()
        return patch

    return enter


def then(pending, change):
    """A collective under way whose result is changed."""
    return replace(pending, finish=lambda: change(pending.finish()))


MUTANTS = {
    "a reduction lost": (("data_parallel",), sums_file, "summed", lambda f: lambda group, axis, dtype: group),
    "a reduction doubled": (("data_parallel",), sums_file, "summed", lambda f: lambda g, *a: f(settled(f(g, *a)), *a)),
    "a scatter off by a thousandth": (
        ("zero3",), piece, "start_reduce_scatter", lambda f: lambda x, axis: then(f(x, axis), lambda y: y * 1.001)
    ),
    "a scatter that only slices": (
        ("zero1",), piece, "start_reduce_scatter",
        lambda f: lambda x, axis: then(f(x, axis), lambda y: x[axis.rank * len(y):][:len(y)]),
    ),
    "a shard of another rank": (
        ("zero2",), piece, "start_all_gather", lambda f: lambda x, axis: then(f(x, axis), lambda y: y.roll(len(x)))
    ),
    "a gradient that never comes home": (("zero3",), Late, "arrive", lambda f: lambda self: setattr(self, "coming", None)),
    "the weights of another layer": (
        ("zero3",), Ahead, "take", lambda f: lambda self, name, stored: f(self, "blocks/0", self.stored["blocks/0"])
    ),
    "a microbatch lost": (("accumulate", "zero1"), accumulate_file, "split", lambda f: lambda b, n: [*f(b, n)[:-1], f(b, n)[0]]),
    "rows numbered from zero on every rank": (
        ("zero3",), Step, "numbered",
        lambda f: lambda self, b: (lambda x, n: (x._replace(rows=x.rows - x.rows.min()), n))(*f(self, b))
    ),
    "rows off by one": (
        ("zero3",), Step, "numbered", lambda f: lambda self, b: (lambda x, n: (x._replace(rows=x.rows + 1), n))(*f(self, b))
    ),
    "a stale key": (
        ("data_parallel",), Opened, "key", lambda f: lambda self, state, rows: random.Key(state.key, rows) if self.random else None
    ),
    "a mean over ranks, not over tokens": (
        ("data_parallel",), Step, "_run",
        lambda f: lambda self, *args: (lambda m, g: (m, tree_map(lambda x: x * 1.01, g)))(*f(self, *args)),
    ),
    "recompute with another mask": (
        ("checkpoint", "zero1"), checkpoint_file, "tree_unflatten", lambda f: shifted_rows(f)
    ),
}


def shifted_rows(unflatten):
    """In a recompute, keys of other rows."""
    def run(spec, leaves):
        tree = unflatten(spec, leaves)
        move = lambda x: random.Key(x.data, x.rows + 1) if isinstance(x, random.Key) else x
        return tree_map(move, tree, is_leaf=lambda x: isinstance(x, random.Key)) if in_backward() else tree

    return run


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_on_the_ranks_is_seen(name):
    stack, target, attribute, fault = MUTANTS[name]
    ranks(1)(lambda: None)                      # the reference is computed by a pool without the fault
    enter = broken(target, attribute, fault)

    def spoil():
        import fspeed.testing.check as check

        check._spoiled = enter()

    def mend():
        import fspeed.testing.check as check

        check._spoiled.stop()

    check_stack(stack, (5, 2))                  # right without the fault
    ranks(2)(spoil)
    try:
        fails(stack)
    finally:
        with contextlib.suppress(RankError):
            ranks(2)(mend)


def test_adam_does_not_see_a_constant_factor_so_laws_use_sgd():
    more = {"mutant": grads_times(1.05)}
    check_stack(("zero2", "mutant"), (5, 2), more=more, optimizer=optim.adamw(1e-3), tolerance=0.2)
    fails(("zero2", "mutant"), more=more)


def test_the_law_sees_a_missing_axis():
    """A placement that forgets to say over which axis it runs: losses are not summed."""
    forgetful = {"forgetful": lambda s, m: replace(TRANSFORMS["data_parallel"](s, m), axes=())}
    fails(("forgetful",), more=forgetful)
