"""Optimizers and schedules against optax: the same numbers, names, defaults and states."""
import inspect
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_table import TABLE, drawn, trained

from fspeed import optim
from fspeed.shard.pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytest.importorskip("optax.contrib")
jnp = jax.numpy
QUICKLY = {"xla_backend_optimization_level": 0}


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def to_jax(tree):
    return tree_map(lambda x: jnp.asarray(x.numpy()), tree)


def form(tree):
    """A tree with its classes' names, and of each leaf the dtype and the shape."""
    if hasattr(tree, "_fields"):
        return type(tree).__name__, {name: form(x) for name, x in zip(tree._fields, tree, strict=True)}
    if isinstance(tree, dict):
        return {k: form(tree[k]) for k in sorted(tree)}
    if isinstance(tree, (tuple, list)):
        return [form(x) for x in tree]
    return None if tree is None else (str(tree.dtype).removeprefix("torch."), tuple(tree.shape))


def assert_close(got, expected, tolerance, what):
    for a, b in zip(tree_leaves(got), jax.tree.leaves(expected), strict=True):
        b = torch.as_tensor(b.__array__().copy()).to(a.dtype)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("name", TABLE)
def test_states_have_optaxs_classes_names_dtypes_and_shapes(name):
    params, grads = drawn(0), drawn(1)
    theirs = TABLE[name](optax)
    _, ours_state = trained(TABLE[name](optim), params, [grads])
    _, theirs_state = jax.eval_shape(theirs.update, to_jax(grads), theirs.init(to_jax(params)), to_jax(params))
    assert form(ours_state) == form(theirs_state)


@pytest.mark.parametrize("name", TABLE)
def test_ten_steps_and_the_state_are_optaxs(name):
    with jax.enable_x64(True), default_dtype(torch.float64):
        ours, theirs = TABLE[name](optim), TABLE[name](optax)
        update = jax.jit(theirs.update, compiler_options=QUICKLY)

        @settings(max_examples=1)
        @given(st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 1e2]))
        def law(seed, scale):
            params = drawn(seed, torch.float64)
            grads = [drawn(seed + 1 + i, torch.float64, scale) for i in range(10)]
            ours_params, ours_state = trained(ours, params, grads)
            theirs_params = to_jax(params)
            theirs_state = theirs.init(theirs_params)
            for g in grads:
                updates, theirs_state = update(to_jax(g), theirs_state, theirs_params)
                theirs_params = optax.apply_updates(theirs_params, updates)
            # float64 on both sides, but for optax's schedules, which are float32
            assert_close(ours_params, theirs_params, 1e-5, name)
            assert_close(ours_state, theirs_state, 1e-5, name)

        law()


@pytest.mark.parametrize("name", ["adamw masked", "muon"])
def test_states_cross_both_ways(name):
    """Case 33: three steps here and three there are six here, and optax's state goes on here."""
    ours, theirs = TABLE[name](optim), TABLE[name](optax)
    params, grads = drawn(0), [drawn(1 + i) for i in range(6)]
    expected, expected_state = trained(ours, params, grads)
    half, state = trained(ours, params, grads[:3])
    there = jax.tree.unflatten(jax.tree.structure(theirs.init(to_jax(params))), map(to_jax, tree_leaves(state)))
    there_params = to_jax(half)
    update = jax.jit(theirs.update, compiler_options=QUICKLY)
    for g in grads[3:]:
        updates, there = update(to_jax(g), there, there_params)
        there_params = optax.apply_updates(there_params, updates)
    assert_close(expected, there_params, 1e-4, name)
    back = tree_unflatten(tree_structure(state), [torch.as_tensor(x.__array__().copy()) for x in jax.tree.leaves(there)])
    got, _ = trained(ours, expected, grads, back)
    assert_close(got, to_jax(trained(ours, expected, grads, expected_state)[0]), 1e-4, name)


def signatures():
    """The names that both libraries have, but for what takes functions."""
    for library in (optax, optax.contrib):
        for name in sorted(set(dir(optim)) & set(dir(library))):
            if inspect.isfunction(getattr(library, name)):
                yield name, getattr(optim, name), getattr(library, name)


def test_argument_names_order_and_defaults_are_optaxs():
    for name, ours, theirs in signatures():
        ours, theirs = (list(inspect.signature(f).parameters.values()) for f in (ours, theirs))
        theirs = [p for p in theirs if p.name not in ("mask_compatible_extra_args",)]
        mine = {p.name: p for p in ours}
        assert [p.name for p in ours][: len(theirs)] == [p.name for p in theirs], name
        for p in theirs:
            default = mine[p.name].default
            if default is not inspect.Parameter.empty and isinstance(p.default, (int, float, tuple, type(None))):
                assert default == p.default, (name, p.name)
            assert (default is inspect.Parameter.empty) == (p.default is inspect.Parameter.empty), (name, p.name)
        assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :]), f"{name}: what optax does not have is keyword-only"


COUNTS = [0, 1, 2, 3, 4, 5, 9, 10, 11, 14, 15, 19, 20, 21, 29, 30, 31, 99, 1000]
CYCLE = {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 3, "decay_steps": 10}
SCHEDULES = {
    "constant": lambda o: o.constant_schedule(0.3),
    "linear": lambda o: o.linear_schedule(0.3, 0.1, 10, 5),
    "linear begins early": lambda o: o.linear_schedule(0.3, 0.1, 10, -5),
    "linear at once": lambda o: o.linear_schedule(0.3, 0.1, 0),
    "polynomial": lambda o: o.polynomial_schedule(0.3, 0.1, 2.5, 10, 5),
    "cosine": lambda o: o.cosine_decay_schedule(0.3, 20, 0.1, 1.5),
    "exponential": lambda o: o.exponential_decay(0.3, 10, 0.5, 3),
    "exponential stairs": lambda o: o.exponential_decay(0.3, 10, 0.5, 3, True, 0.1),
    "exponential growth": lambda o: o.exponential_decay(0.3, 10, 1.5, end_value=0.5),
    "exponential zero rate": lambda o: o.exponential_decay(0.3, 10, 0.0),
    "piecewise constant": lambda o: o.piecewise_constant_schedule(0.3, {10: 0.5, 20: 0.2}),
    "piecewise nothing": lambda o: o.piecewise_constant_schedule(0.3),
    "piecewise linear": lambda o: o.piecewise_interpolate_schedule("linear", 0.3, {10: 0.5, 20: 3.0}),
    "piecewise cosine": lambda o: o.piecewise_interpolate_schedule("cosine", 0.3, {0: 2.0, 10: 0.5, 20: 3.0}),
    "warmup constant": lambda o: o.warmup_constant_schedule(0.1, 0.3, 10),
    "warmup cosine": lambda o: o.warmup_cosine_decay_schedule(0.1, 0.3, 10, 30, 0.05, 2.0),
    "warmup cosine to zero": lambda o: o.warmup_cosine_decay_schedule(0.0, 0.0, 10, 30),
    "warmup exponential": lambda o: o.warmup_exponential_decay_schedule(0.1, 0.3, 10, 5, 0.5, 2, True, 0.01),
    "onecycle linear": lambda o: o.linear_onecycle_schedule(30, 0.3),
    "onecycle cosine": lambda o: o.cosine_onecycle_schedule(30, 0.3),
    "joined": lambda o: o.join_schedules([o.constant_schedule(0.1), o.linear_schedule(0.3, 0.1, 10)], [10]),
    "sgdr": lambda o: o.sgdr_schedule([CYCLE, {**CYCLE, "decay_steps": 20}]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_optaxs_of_ints_and_of_tensors(name):
    ours, theirs = SCHEDULES[name](optim), SCHEDULES[name](optax)
    expected = jax.jit(jax.vmap(theirs), compiler_options=QUICKLY)(jnp.array(COUNTS))
    for count, value in zip(COUNTS, expected, strict=True):
        number, tensor = ours(count), ours(torch.tensor(count, dtype=torch.int32))
        assert type(number) is float and tensor.dtype == torch.float64 and tensor.shape == ()
        assert number == tensor.item()
        assert number == pytest.approx(float(value), rel=1e-5, abs=1e-7), count    # optax's are float32


def test_no_schedule_of_optaxs_is_missing():
    named = [n for n in dir(optax) if n.endswith(("_schedule", "_schedules", "_decay")) and n != "WeightDecaySchedule"]
    assert len(named) > 12
    assert not [n for n in named if not hasattr(optim, n) and not n.startswith("inject")]
