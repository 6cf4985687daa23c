"""Optimizers and schedules against optax: the same numbers, names, defaults and states."""
import inspect
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_table import TABLE, drawn, trained

from fspeed import optim
from fspeed.shard.pytree import tree_leaves, tree_map

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402
import optax.contrib  # noqa: E402


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
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
        torch.testing.assert_close(a, torch.as_tensor(b.__array__().copy()).to(a.dtype), rtol=tolerance, atol=tolerance, msg=what)


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
        update = jax.jit(theirs.update, compiler_options={"xla_backend_optimization_level": 0})

        @settings(max_examples=3)
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
            # float64 on both sides; what is left is what either keeps in float32
            assert_close(ours_params, theirs_params, 1e-6, name)
            assert_close(ours_state, theirs_state, 1e-6, name)

        law()
