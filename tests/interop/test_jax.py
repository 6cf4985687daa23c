"""Trees cross between torch and JAX with their bits and names; models of JAX's and optimizers of optax's train under a step."""
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fspeed import optim, random
from fspeed.layer import layer
from fspeed.loss import mean
from fspeed.record import digest
from fspeed.save import restore, save
from fspeed.shard.pytree import tree_leaves, tree_map, tree_paths, tree_structure
from fspeed.step import step as make_step
from fspeed.testing.pool import mesh, ranks
from fspeed.testing.problem import problem
from fspeed.testing.trees import FLOATS, tensors, trees
from fspeed.transforms.zero_shard import zero_shard
from fspeed.tree import whole

jax = pytest.importorskip("jax")
jnp = jax.numpy

from fspeed.interop.jax import from_optax, key_to_jax, to_jax, to_torch  # noqa: E402

NARROW = [*(x for x in FLOATS if x != torch.float64), torch.int32, torch.uint8, torch.bool, torch.uint32, torch.float8_e4m3fn]
WIDE = [torch.int64, torch.float64, torch.complex128, torch.uint64]


def assert_same(got: Any, expected: Any) -> None:
    """Bitwise, by path."""
    assert tree_structure(got) == tree_structure(expected)
    for path, a, b in zip(tree_paths(expected), tree_leaves(got), tree_leaves(expected), strict=True):
        assert digest(a) == digest(b) if isinstance(b, torch.Tensor) else type(a) is type(b) and repr(a) == repr(b), path


def assert_near(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Sums in another order: float32 over a few steps."""
    assert tree_structure(got) == tree_structure(expected)
    for path, a, b in zip(tree_paths(expected), tree_leaves(got), tree_leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance, err_msg=path)


# ---------------------------------------------------------------- leaves
@settings(max_examples=60)
@given(trees(st.one_of(tensors(NARROW), st.none(), st.integers(), st.text(max_size=2))))
def test_bits_and_structure_come_back(tree: Any) -> None:
    there = to_jax(tree)
    for x, j in zip(tree_leaves(tree), jax.tree.leaves(there), strict=True):       # the same order: both sort keys
        if isinstance(x, torch.Tensor):
            assert isinstance(j, jax.Array) and j.shape == x.shape and f"torch.{j.dtype}" == str(x.dtype)
    assert_same(to_torch(there), tree)
    assert_same(to_torch(to_jax(tree, copy=False), copy=False), tree)


@settings(max_examples=20)
@given(tensors(WIDE))
def test_64_bits_are_refused_or_kept(x: torch.Tensor) -> None:
    name = str(x.dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"to_jax: leaf 'a/0' is {name}, which JAX would make \w+32|64: .*jax_enable_x64"):
        to_jax({"a": [x]})
    with pytest.raises(ValueError, match=rf"leaf 'a' is {name}"):
        to_jax({"a": x.numpy()})
    with jax.enable_x64(True):
        there = to_jax(x)
        assert str(there.dtype) == name
        assert_same(to_torch(there), x)


def test_numpy_arrays_go_both_ways() -> None:
    tree = {"a": np.arange(3, dtype=np.int32), "b": np.float32(2), "c": np.asarray(jnp.ones(2, jnp.bfloat16))}
    assert_same(to_torch(tree), {"a": torch.arange(3, dtype=torch.int32), "b": torch.tensor(2.0), "c": torch.ones(2).bfloat16()})
    assert_same(to_torch(to_jax(tree)), to_torch(tree))


def test_memory_is_not_shared_unless_asked() -> None:
    t, j = torch.zeros(64), jnp.zeros(64)
    copies = to_jax(t), to_torch(j)
    shared = to_jax(t, copy=False), to_torch(j, copy=False)
    t.fill_(1)
    copies[1].fill_(1)
    assert not copies[0].any() and not j.any()
    assert shared[0].all() and shared[1].data_ptr() == j.unsafe_buffer_pointer()


def test_a_write_after_dispatch_changes_nothing() -> None:
    """JAX computes later than it returns, from memory that torch may write to meanwhile."""
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda i, y: jnp.sin(y) + x, x))
    x = torch.linspace(0, 1, 200_000)
    expected = np.asarray(slow(to_jax(x)))
    for _ in range(5):
        later = slow(to_jax(y := x.clone()))
        y.zero_()
        np.testing.assert_array_equal(np.asarray(later), expected)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_keys_are_the_same_keys(seed: int, data: int) -> None:
    raw, typed = random.key(seed), jax.random.key(np.uint32(seed))
    assert_same(to_torch({"key": typed}), {"key": raw})
    assert key_to_jax(raw) == typed and key_to_jax(raw).dtype == typed.dtype
    assert_same(to_torch(jax.random.fold_in(key_to_jax(raw), np.uint32(data))), random.fold_in(raw, data))
    assert_same(to_torch(jax.random.split(key_to_jax(raw), 3)), random.split(raw, 3))


def traced(x: Any) -> Any:
    return jax.jit(lambda y: to_torch({"a": y}))(x)


REFUSED = {
    "function": (lambda: to_torch({"a": [jax.nn.relu]}), TypeError, r"to_torch: leaf 'a/0' is a .*equinox.partition"),
    "function there": (lambda: to_jax({"a": torch.relu}), TypeError, r"to_jax: leaf 'a' is a builtin_function"),
    "traced": (lambda: traced(jnp.ones(2)), TypeError, r"leaf 'a' is traced: call to_torch outside"),
    "key": (lambda: to_torch(jax.random.key(0, impl="rbg")), ValueError, r"to_torch: the value is a key of rbg"),
    "raw key": (lambda: key_to_jax(torch.zeros(2)), ValueError, r"a raw key is int32 \(..., 2\).*got torch.float32 \(2,\)"),
    "int4": (lambda: to_torch({"a": jnp.ones(2, jnp.int4)}), ValueError, r"leaf 'a' .*S4"),
    "differentiated": (lambda: to_jax({"a": torch.ones(2, requires_grad=True) * 2}), ValueError, r"'a' is being differentiated"),
    "sparse": (lambda: to_jax({"a": torch.eye(2).to_sparse()}), ValueError, r"leaf 'a' "),
    "torch.func": (lambda: torch.func.grad(lambda x: to_jax({"a": x}))(torch.ones(())), ValueError, r"leaf 'a' "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_cross_is_refused_by_name(name: str) -> None:
    do, error, says = REFUSED[name]
    with pytest.raises(error, match=says):
        do()


def test_parameters_of_a_module_cross() -> None:
    module = torch.nn.Linear(2, 3)
    np.testing.assert_array_equal(to_jax(dict(module.named_parameters()))["weight"], module.weight.detach())


# ---------------------------------------------------------------- structures
@partial(jax.tree_util.register_dataclass, data_fields=["x", "rest"], meta_fields=["unit"])
@dataclass
class Measured:
    x: Any
    rest: Any
    unit: str


def test_nodes_of_jax_are_nodes_of_fspeed() -> None:
    flax, eqx = pytest.importorskip("flax"), pytest.importorskip("equinox")
    module = eqx.filter(eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0)), eqx.is_array)
    frozen = flax.core.FrozenDict({"b": jnp.ones(1), "a": {"c": jnp.ones(4)}})
    tree = {"m": Measured(jnp.ones(2), [jnp.zeros(3)], "cm"), "f": frozen, "e": module}
    there = to_torch(tree)
    assert type(there["f"]) is flax.core.FrozenDict and type(there["e"]) is eqx.nn.MLP and there["m"].unit == "cm"
    assert tree_paths(there) == [
        *(f"e/layers/{i}/{name}" for i in range(2) for name in ("weight", "bias")), "f/a/c", "f/b", "m/x", "m/rest/0",
    ]
    assert all(isinstance(x, torch.Tensor) for x in tree_leaves(there))
    doubled = tree_map(lambda x: 2 * x, there)
    back = to_jax(doubled)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back, jax.tree.map(lambda x: 2 * x, tree))


def test_a_state_is_a_tree_of_jax() -> None:
    p = problem()
    state = make_step(p.loss, optim.adamw(1e-3), layers=p.layers, trainable=p.trainable).init(p.params)
    with jax.enable_x64(True):
        there = to_jax(state)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(there))
        assert_same(to_torch(there), state)
    with pytest.raises(ValueError, match="to_jax: leaf 'step' is int64"):
        to_jax(state)


def test_dicts_are_paired_by_name() -> None:
    tree = {"w": torch.tensor(1), "b": torch.tensor(2), "a": {"z": torch.tensor(3), "y": torch.tensor(4)}}
    tree = tree_map(lambda x: x.int(), tree)
    there = to_jax(tree)
    assert {k: int(v) for k, v in {**there, **there["a"]}.items() if k != "a"} == {"w": 1, "b": 2, "z": 3, "y": 4}
    assert_same(to_torch(there), tree)


# ---------------------------------------------------------------- JAX's models under a step
ROWS, STEPS, RATE = 6, 3, 0.2


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = random.normal(random.key(1), (ROWS, 3))
    return x, x.sum(1).sin()


def trained(loss: Any, params: Any, layers: str, optimizer: Any = None) -> tuple[Any, Any]:
    """Some steps under ZeRO-3, and the whole parameters and optimizer state."""
    step = zero_shard(make_step(loss, optimizer or optim.sgd(RATE), layers=layers), mesh(data=dist.get_world_size()), stage=3)
    state = step.init(params)
    for _ in range(STEPS):
        state, _ = step(state, tree_map(lambda x: x.tensor_split(dist.get_world_size())[dist.get_rank()], data()))
    return step.params(state), whole(state.opt_state)


def trained_by_jax(predict: Any, params: Any) -> Any:
    x, y = to_jax(data())
    for _ in range(STEPS):
        grads = jax.grad(lambda p: ((predict(p, x) - y) ** 2).mean())(params)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return params


def flax_loss(params: Any, batch: Any, key: Any) -> Any:
    x, y = batch
    x = F.relu(dense(params["params"]["Dense_0"], x))
    return mean((dense(params["params"]["Dense_1"], x)[:, 0] - y) ** 2)


@layer
def dense(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ p["kernel"] + p["bias"]


def test_a_flax_model_trains_sharded() -> None:
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.relu(nn.Dense(5)(x))
            return nn.Dense(1)(x)[:, 0]

    params = Model().init(jax.random.key(0), jnp.ones((1, 3)))
    expected = trained_by_jax(Model().apply, params)
    for got, _ in ranks(2)(trained, flax_loss, to_torch(params), "params/*"):
        assert_near(to_jax(got), expected)


def equinox_loss(params: Any, batch: Any, key: Any) -> Any:
    x, y = batch
    linear = layer(lambda p, x: x @ p.weight.t() + p.bias)
    return mean((linear(params.layers[1], F.relu(linear(params.layers[0], x)))[:, 0] - y) ** 2)


def equinox_trained(params: Any) -> Any:
    return trained(equinox_loss, to_torch(params), "layers/*")[0]       # a rank learns of equinox's nodes by to_torch


def test_an_equinox_model_trains_sharded() -> None:
    eqx = pytest.importorskip("equinox")
    params, static = eqx.partition(eqx.nn.MLP(3, 1, 5, 1, key=jax.random.key(0)), eqx.is_array)
    expected = trained_by_jax(lambda p, x: jax.vmap(eqx.combine(p, static))(x)[:, 0], params)
    for got in map(to_jax, ranks(2)(equinox_trained, to_torch(params))):
        assert jax.tree.structure(got) == jax.tree.structure(params)
        assert eqx.combine(got, static)(jnp.ones(3)).shape == (1,)
        assert_near(got, expected)


# ---------------------------------------------------------------- optax's optimizers under a step
def optimizers(name: str) -> tuple[Any, Any]:
    """One of optax's, wrapped, and ours."""
    import optax

    tall = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
    ours_tall = lambda tree: tree_map(lambda x: x.dim() > 1, tree)
    clip, rate = (lambda o: o.clip_by_global_norm(0.3)), 0.05
    return {
        "adamw": lambda: (from_optax(optax.adamw(rate), elementwise=True), optim.adamw(rate)),
        "adamw in whole": lambda: (from_optax(optax.adamw(rate)), optim.adamw(rate)),
        "clip and mask": lambda: (
            from_optax(optax.chain(clip(optax), optax.adamw(rate, weight_decay=0.1, mask=tall))),
            optim.chain(clip(optim), optim.adamw(rate, weight_decay=0.1, mask=ours_tall)),
        ),
    }[name]()


def both(name: str) -> list:
    p, n, r = problem(), dist.get_world_size(), dist.get_rank()
    out = []
    for optimizer in optimizers(name):
        step = zero_shard(make_step(p.loss, optimizer, layers=p.layers, trainable=p.trainable), mesh(data=n))
        state = step.init(p.params)
        for i in range(STEPS):
            state, _ = step(state, tree_map(lambda x: x.tensor_split(n)[r], p.batch(i, ROWS)))
        out.append((step.params(state), [x.shape for x in tree_leaves(state.opt_state)]))
    return out


@pytest.mark.parametrize("name", ["adamw", "adamw in whole", "clip and mask"])
def test_an_optimizer_of_optax_is_ours(name: str) -> None:
    pytest.importorskip("optax")
    for (theirs, shapes), (ours, our_shapes) in ranks(2)(both, name):
        assert_near(theirs, ours)
        assert shapes == our_shapes or name != "adamw"


def test_optax_on_a_plain_tree_is_pure() -> None:
    optax = pytest.importorskip("optax")
    tx, real = from_optax(optax.adamw(0.1)), optax.adamw(0.1)
    params, grads = {"w": torch.randn(3, 4), "b": torch.randn(65)[1:]}, {"w": torch.randn(4, 3).t(), "b": torch.randn(64)}
    before = tree_map(torch.clone, (params, grads))
    state, theirs = tx.init(params), real.init(to_jax(params))
    for _ in range(3):
        kept = tree_map(torch.clone, state)
        updates, after = tx.update(grads, state, params)
        assert_same(state, kept)
        expected, theirs = real.update(to_jax(grads), theirs, to_jax(params))
        assert_near(to_jax((updates, after)), (expected, theirs), 1e-6)
        state = after
    assert_same((params, grads), before)


def test_what_optax_hands_through_is_copied() -> None:
    """JAX returns an argument that is returned unchanged as it is: memory that torch may write to."""
    optax = pytest.importorskip("optax")
    tx = from_optax(optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, state)))
    params, grads = torch.ones(64), torch.full((64,), 2.0)
    state = tx.init(params)
    updates, new = tx.update(grads, state, params)
    for x in (updates, new):
        x.zero_()
    assert (params == 1).all() and (grads == 2).all() and (state == 1).all()
    state.zero_()
    assert (params == 1).all()


def test_optax_state_is_saved_and_restored(tmp_path: Any) -> None:
    optax = pytest.importorskip("optax")
    p = problem()
    step = make_step(p.loss, from_optax(optax.adamw(optax.cosine_decay_schedule(0.1, 5))), layers=p.layers, trainable=p.trainable)
    state = step.init(p.params)
    for i in range(2):
        state, _ = step(state, p.batch(i, ROWS))
    save(tmp_path / "x", state)
    got = restore(tmp_path / "x", step.init(problem(seed=4).params))
    assert_same(got, state)
    assert_same(step(got, p.batch(2, ROWS))[0], step(state, p.batch(2, ROWS))[0])


def test_what_is_not_here_is_not_gathered() -> None:
    optax = pytest.importorskip("optax")
    from fspeed.shard.piece import Absent
    from fspeed.tree import cut

    params = cut({"w": torch.ones(2)}, place=(("stages", lambda name, group: Absent()),))
    with pytest.raises(ValueError, match=r"on other ranks.*elementwise=True"):
        from_optax(optax.adamw(0.1)).init(params)
    from_optax(optax.adamw(0.1), elementwise=True).init(params)
