"""Collectives against the same function of all ranks' values in one process: values, and all ways to differentiate and trace.

A case is a collective over one axis of a mesh. Values are small integers, so every sum is exact in every dtype and equality is
bitwise; only pmax divides (by the number of ranks that tie).
"""

import contextlib
import itertools
import math
import os
import socket
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from fspeed.shard import collectives, wire
from fspeed.shard.collectives import all_gather, all_to_all, axis_index, axis_size, pmax, pmean, ppermute, psum, reduce_scatter
from fspeed.shard.mesh import Axis
from fspeed.shard.wire import CollectiveError
from fspeed.testing import pool
from fspeed.testing.count import SETTLE, Counted
from fspeed.testing.pool import Pool, RankError, mesh, ranks

# torch's own, at the first use of forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

MESHES = [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 1, "b": 2}]
ALONE = Axis("data", 0, 0, 1, None)
PAIR = Axis("data", 0, 0, 2, "not a group: these calls fail before they send")


@dataclass(frozen=True)
class Case:
    sizes: dict[str, int]
    axis: str
    name: str
    shape: tuple[int, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.sizes[self.axis]

    @property
    def world(self) -> int:
        return math.prod(self.sizes.values())

    def local(self, x: Tensor) -> Tensor:
        """The collective, on a rank."""
        return getattr(collectives, self.name)(x, mesh(**self.sizes).axis(self.axis), **self.kwargs)

    def all_at_once(self, xs: Tensor) -> Tensor:
        """The same function of all ranks' values, (world, ...) -> (world, ...)."""
        before, after = [math.prod(part) for part in self.around()]
        grid = xs.unflatten(0, (before, self.size, after))
        lines = [[reference(self, list(grid[i, :, j])) for j in range(after)] for i in range(before)]
        return torch.stack([lines[i][j][r] for i in range(before) for r in range(self.size) for j in range(after)])

    def around(self) -> tuple[list[int], list[int]]:
        at = list(self.sizes).index(self.axis)
        sizes = list(self.sizes.values())
        return sizes[:at], sizes[at + 1 :]


def reference(case: Case, xs: list[Tensor]) -> list[Tensor]:
    """What each rank of one line of the mesh gets, from what they give."""
    n, kwargs = len(xs), case.kwargs
    match case.name:
        case "psum":
            return [sum(xs)] * n
        case "pmean":
            return [sum(xs) / n] * n
        case "pmax":
            return [torch.stack(xs).amax(0)] * n
        case "all_gather":
            return [joined(xs, kwargs["dim"])] * n
        case "reduce_scatter":
            return list(sum(xs).tensor_split(n, kwargs["dim"]))
        case "ppermute":
            source = {d: s for s, d in kwargs["perm"]}
            return [xs[source[r]] if r in source else xs[r] * 0 for r in range(n)]
        case "all_to_all":
            return [joined([x.tensor_split(n, kwargs["split_dim"])[r] for x in xs], kwargs["concat_dim"]) for r in range(n)]
    raise ValueError(case.name)


def joined(xs: list[Tensor], dim: int) -> Tensor:
    """torch.cat of equal shapes; that of empty ones forgets their gradient."""
    dim %= xs[0].ndim
    return torch.stack(xs, dim).flatten(dim, dim + 1)


NAMES = ["psum", "pmean", "pmax", "all_gather", "reduce_scatter", "ppermute", "all_to_all"]


@st.composite
def cases(draw: st.DrawFn, names: list[str] = NAMES, meshes: list[dict[str, int]] = MESHES) -> Case:
    sizes = draw(st.sampled_from(meshes))
    axis = draw(st.sampled_from(list(sizes)))
    name = draw(st.sampled_from(names))
    n = sizes[axis]
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 5, 0, 7]), max_size=3))
    dims = st.integers(-len(shape), len(shape) - 1)
    kwargs: dict[str, Any] = {}
    if name in ("all_gather", "reduce_scatter", "all_to_all") and not shape:
        shape, dims = [3], st.integers(-1, 0)
    if name in ("all_gather", "reduce_scatter"):
        kwargs["dim"] = draw(dims)
    if name == "all_to_all":
        kwargs |= {"split_dim": draw(dims), "concat_dim": draw(dims)}
    if name == "ppermute":
        ends = st.lists(st.sampled_from(range(n)), unique=True, max_size=n)
        kwargs["perm"] = list(zip(draw(ends), draw(ends), strict=False))
    if name in ("reduce_scatter", "all_to_all"):
        shape[kwargs.get("dim", kwargs.get("split_dim"))] *= n
    return Case(sizes, axis, name, tuple(shape), kwargs)


def integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


def equal(got: list[Tensor], want: Tensor, rtol: float = 0) -> None:
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol, equal_nan=True)


# ---- values

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.complex64]


def on_rank(case: Case, xs: Tensor) -> Tensor:
    x = xs[dist.get_rank()]
    x = x.mT.contiguous().mT if x.ndim > 1 else x  # strided
    before = x.clone()
    y = case.local(x)
    assert torch.equal(x, before)
    return y


@settings(max_examples=150)
@given(cases(), st.sampled_from(DTYPES), st.integers(0, 99))
def test_values(case: Case, dtype: torch.dtype, seed: int) -> None:
    xs = integers(seed, case.world, *case.shape).abs().to(dtype)
    if case.name == "pmax" and dtype.is_complex:
        return
    equal(ranks(case.world)(on_rank, case, xs), case.all_at_once(xs))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_booleans_travel_and_are_counted(n: int) -> None:
    def on_rank() -> list[Any]:
        axis = mesh(a=n).axis("a")
        x = torch.tensor([True, axis.rank == 0])
        return [psum(x, axis).tolist(), pmax(x, axis).tolist(), all_gather(x, axis).tolist(), ppermute(x, axis, [(0, n - 1)]).dtype]

    ends = list(itertools.chain(*[[True, r == 0] for r in range(n)]))
    assert ranks(n)(on_rank) == [[[n, 1], [True, True], ends, torch.bool]] * n


@pytest.mark.parametrize("n", [2, 4])
def test_pmax_of_nan_is_nan_everywhere(n: int) -> None:
    for bad in range(n):
        on_rank = lambda bad: pmax(torch.tensor([math.nan if dist.get_rank() == bad else 1.0, -math.inf]), mesh(a=n).axis("a"))
        equal(ranks(n)(on_rank, bad), torch.tensor([[math.nan, -math.inf]] * n))


def test_axis_index_and_size() -> None:
    at = lambda: [(axis_index(axis), axis_size(axis)) for axis in mesh(a=2, b=2).axes]
    assert ranks(4)(at) == [[(0, 2), (0, 2)], [(0, 2), (1, 2)], [(1, 2), (0, 2)], [(1, 2), (1, 2)]]


# ---- derivatives: each way to take one is the same function of a rank's collective and of all ranks' values at once


def loss(f: Any, x: Tensor, c: Tensor) -> Tensor:
    return (c * f(x) ** 3).sum()  # each rank's loss counts


def autograd(f: Any, x: Tensor, **kwargs: Any) -> Tensor:
    x = x if x.requires_grad else x.detach().requires_grad_()
    return torch.autograd.grad(f(x), x, **kwargs)[0]


def autograd_twice(f: Any, x: Tensor, v: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return autograd(lambda x: (autograd(f, x, create_graph=True) * v).sum(), x)


def dual(f: Any, x: Tensor, v: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, v))).tangent


WAYS: dict[str, Any] = {
    "autograd": lambda f, x, v, c: autograd(partial(loss, f, c=c), x),
    "autograd twice": lambda f, x, v, c: autograd_twice(partial(loss, f, c=c), x, v),
    "dual numbers": lambda f, x, v, c: dual(f, x, v),
    "grad": lambda f, x, v, c: grad(partial(loss, f, c=c))(x),
    "vjp": lambda f, x, v, c: vjp(f, x)[1](c)[0],
    "jvp": lambda f, x, v, c: jvp(lambda x: f(x * x), (x,), (v,))[1],
    "grad of grad": lambda f, x, v, c: grad(lambda x: (grad(partial(loss, f, c=c))(x) * v).sum())(x),
    "jvp of grad": lambda f, x, v, c: jvp(grad(partial(loss, f, c=c)), (x,), (v,))[1],
    "grad of jvp": lambda f, x, v, c: grad(lambda x: (jvp(lambda x: f(x) ** 3, (x,), (v,))[1] * c).sum())(x),
    "jvp of jvp": lambda f, x, v, c: jvp(lambda x: jvp(lambda x: f(x * x), (x,), (v,))[1], (x,), (v,))[1],
    "vmap": lambda f, x, v, c: vmap(f, -1, -1)(torch.stack([x, v, x * v], -1)),
    "vmap of vmap": lambda f, x, v, c: vmap(vmap(f, -1, -1), -2, -2)(torch.stack([x, v], -1).unsqueeze(-2)),
    "vmap of grad": lambda f, x, v, c: vmap(grad(partial(loss, f, c=c)), -1, -1)(torch.stack([x, v], -1)),
    "vmap of jvp": lambda f, x, v, c: vmap(lambda v: jvp(f, (x,), (v,))[1], -1, -1)(torch.stack([x, v], -1)),
    "vmap of the pull": lambda f, x, v, c: vmap(vjp(f, x)[1], -1, -1)(torch.stack([c, c + 1], -1))[0],
    "grad of vmap": lambda f, x, v, c: grad(lambda xs: (c.unsqueeze(-1) * vmap(f, -1, -1)(xs) ** 3).sum())(torch.stack([x, v], -1)),
    "traced": lambda f, x, v, c: make_fx(grad(partial(loss, f)))(v, c)(x, c),
    "traced on fake tensors": lambda f, x, v, c: make_fx(grad(partial(loss, f)), tracing_mode="fake")(v, c)(x, c),
    "traced vmap": lambda f, x, v, c: make_fx(lambda xs: vmap(f, -1, -1)(xs))(torch.stack([v, x], -1))(torch.stack([x, v], -1)),
}


def derivative(way: str, case: Case, *all_ranks: Tensor) -> Tensor:
    return WAYS[way](case.local, *[x[dist.get_rank()] for x in all_ranks]).detach()


@pytest.mark.parametrize("way", WAYS)
def test_derivatives(way: str) -> None:
    @settings(max_examples=5 if "traced" in way else 15)
    @given(cases(meshes=[{"a": 2}, {"a": 3}, {"a": 2, "b": 2}]), st.integers(0, 99))
    def check(case: Case, seed: int) -> None:
        x, v = integers(seed, 2, case.world, *case.shape)
        c = integers(seed + 1, *case.all_at_once(x).shape)
        want = WAYS[way](case.all_at_once, x, v, c)
        got = ranks(case.world)(derivative, way, case, x, v, c)
        equal(got, want, rtol=1e-12 if case.name in ("pmax", "pmean") else 0)  # these divide, perhaps in another order

    check()


@settings(max_examples=60)
@given(cases(), st.integers(0, 99))
def test_adjoint(case: Case, seed: int) -> None:
    """<c, J t> = <J' c, t>, summed over the ranks."""

    def on_rank(x: Tensor, t: Tensor, c: Tensor) -> list[float]:
        x, t, c = (z[dist.get_rank()] for z in (x, t, c))
        return [(c * jvp(case.local, (x,), (t,))[1]).sum().item(), (vjp(case.local, x)[1](c)[0] * t).sum().item()]

    x, t = integers(seed, 2, case.world, *case.shape)
    c = integers(seed + 1, *case.all_at_once(x).shape)
    left, right = map(sum, zip(*ranks(case.world)(on_rank, x, t, c), strict=True))
    assert left == pytest.approx(right, rel=1e-12)


def test_a_trace_has_the_collectives_and_runs_on_fake_groups_of_any_size() -> None:
    def on_rank() -> tuple[list[str], list[torch.Size]]:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=1024)
        axis = pool.make_mesh(data=1024).axis("data")
        f = lambda x: (all_gather(psum(x, axis), axis) ** 2).sum()
        graph = make_fx(grad(f), tracing_mode="fake")(torch.ones(2048)).graph
        names = [node.target._opname for node in graph.nodes if "_c10d" in str(node.target)]
        meta = torch.ones(2048, device="meta")
        return names, [psum(meta, axis).shape, reduce_scatter(meta, axis).shape, all_to_all(meta, axis).shape]

    with Pool(1) as one:
        ((names, shapes),) = one(on_rank)
    started = [name for name in names if name != "wait_tensor"]
    assert len(names) == 2 * len(started)  # each is waited for
    there, back = ["all_to_all_single", "all_gather_into_tensor"], ["all_to_all_single"]
    assert started == [*there, "all_gather_into_tensor", *back, *there]
    assert [tuple(shape) for shape in shapes] == [(2048,), (2,), (2048,)]


# ---- sums


@settings(max_examples=40)
@given(
    st.integers(2, 4),
    st.integers(1, 65),
    st.sampled_from(FLOATS),
    st.integers(0, 99),
)
def test_a_sum_has_the_same_bits_on_all_ranks_in_all_places_by_all_routes(n: int, s: int, dtype: torch.dtype, seed: int) -> None:
    def on_rank(xs: Tensor) -> list[Tensor]:
        axis = mesh(a=n).axis("a")
        x = xs[axis.rank]
        return [psum(x, axis), psum(x.flip(0), axis).flip(0), all_gather(reduce_scatter(x, axis), axis), psum(x[3:4], axis)]

    xs = torch.randn(n, n * s, generator=torch.Generator().manual_seed(seed)).to(dtype) * 100
    total = sum(xs.float() if xs.element_size() < 4 else xs).to(dtype)  # in the order of the ranks, rounded once
    for straight, flipped, scattered, short in ranks(n)(on_rank, xs):
        assert torch.equal(straight, total)
        assert torch.equal(flipped, total)
        assert torch.equal(scattered, total)
        assert torch.equal(short, total[3:4])


def test_what_is_sent() -> None:
    """gloo's own reduce_scatter would send an all_reduce's bytes."""

    def on_rank(n: int) -> list[tuple[list[str], int]]:
        axis, x, sent = mesh(a=n).axis("a"), torch.ones(400), []
        for f in (psum, all_gather, reduce_scatter, all_to_all):
            with Counted(n) as counted:
                f(x, axis)
            sent.append((list(counted.calls), counted.total))
        return sent

    gather, exchange = "all_gather_into_tensor", "all_to_all_single"
    assert ranks(4)(on_rank, 4)[0] == [([exchange, gather], 600), ([gather], 1200), ([exchange], 300), ([exchange], 300)]
    assert ranks(2)(on_rank, 2)[0] == [(["all_reduce"], 400), ([gather], 400), ([exchange], 200), ([exchange], 200)]


# ---- under way


def test_a_start_does_not_wait_for_the_others() -> None:
    def on_rank() -> list[Tensor]:
        axis = mesh(a=2).axis("a")
        x = torch.arange(4.0) + axis.rank
        if axis.rank == 1:
            dist.recv(torch.zeros(1), 0)  # sent after rank 0's start has come back
        first, second = wire.start_all_gather(x, axis), wire.start_reduce_scatter(x, axis)
        third = wire.start_psum(x, axis)
        if axis.rank == 0:
            dist.send(torch.ones(1), 1)
        return [third.wait(), second.wait(), first.wait()]  # in any order

    both = torch.tensor([1.0, 3, 5, 7])
    for rank, (third, second, first) in enumerate(ranks(2)(on_rank, timeout=20)):
        assert torch.equal(third, both)
        assert torch.equal(second, both[2 * rank :][:2])
        assert torch.equal(first, torch.tensor([0.0, 1, 2, 3, 1, 2, 3, 4]))


def test_what_runs_at_once_has_short_names_in_gloo() -> None:
    """Names longer than 15 characters corrupt the heap when two collectives complete at once."""

    def on_rank() -> set[str]:
        axis, x = mesh(a=3).axis("a"), torch.ones(9)
        starts = [wire.start_all_gather, wire.start_reduce_scatter, wire.start_psum, wire.start_pmax]
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            for pending in [start(x, axis) for start in starts]:
                pending.wait()
            wire.start_all_to_all(x.view(3, 3), axis).wait()
            c10d = torch.ops._c10d_functional
            c10d.wait_tensor(c10d.all_gather_into_tensor(x, 3, axis.group))
            c10d.wait_tensor(c10d.all_reduce(x, "sum", axis.group))
            time.sleep(SETTLE)
        return {event.name for event in prof.events() if event.name.startswith("c10d::")}

    assert ranks(3)(on_rank)[0] == {"c10d::_allgather_base_", "c10d::alltoall_base_", "c10d::allreduce_"}


# ---- errors


def test_what_cannot_be_is_refused_before_anything_is_sent() -> None:
    for call, why in [
        (lambda: reduce_scatter(torch.ones(3), PAIR), "evenly"),
        (lambda: wire.start_reduce_scatter(torch.ones(3), PAIR), "evenly"),
        (lambda: all_to_all(torch.ones(2, 3), PAIR, split_dim=1), "evenly"),
        (lambda: all_gather(torch.tensor(1.0), PAIR), "no dim 0"),
        (lambda: wire.start_all_gather(torch.tensor(1.0), PAIR), "scalar"),
        (lambda: all_gather(torch.ones(2), ALONE, dim=1), "no dim 1"),
        (lambda: ppermute(torch.ones(2), PAIR, [(0, 1), (0, 0)]), "at most once"),
        (lambda: ppermute(torch.ones(2), PAIR, [(0, 1), (1, 1)]), "at most once"),
        (lambda: ppermute(torch.ones(2), PAIR, [(0, 2)]), "ranks under 2"),
    ]:
        with pytest.raises(ValueError, match=why):
            call()


def told(call: Any) -> str:
    try:
        call(mesh(a=2).axis("a"))
    except CollectiveError as error:
        return str(error)
    return "no error"


def never(axis: Axis) -> None:
    if axis.rank == 0:
        psum(torch.ones(3), axis)


def gone(axis: Axis) -> None:
    """Rank 1 drops its connections, as if it had died, but lives on to answer the pool."""
    for fd in os.listdir("/proc/self/fd") if axis.rank else []:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as connection:
            if connection.family == socket.AF_INET and connection.getpeername():
                connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(CollectiveError) if axis.rank else contextlib.nullcontext():
        psum(torch.ones(3), axis)


def three_to_one(axis: Axis) -> None:
    for _ in range(1 + 2 * axis.rank):
        psum(torch.ones(3), axis)


def other_op(axis: Axis) -> None:
    (psum if axis.rank else all_gather)(torch.ones(4), axis)


def other_size(axis: Axis) -> None:
    psum(torch.ones(4 + axis.rank), axis)


def other_shape(axis: Axis) -> None:
    psum(torch.ones((2, 3) if axis.rank else (3, 2)), axis)


def other_dtype(axis: Axis) -> None:
    all_gather(torch.ones(4, dtype=torch.int32 if axis.rank else torch.float32), axis)


def other_reduction(axis: Axis) -> None:
    (psum if axis.rank else pmean)(torch.ones(4), axis)  # the same reduction: no error
    (psum if axis.rank else pmax)(torch.ones(4), axis)


def other_permutation(axis: Axis) -> None:
    ppermute(torch.ones(4), axis, [(0, 1), (1, 0)] if axis.rank else [(0, 0), (1, 1)])


def test_a_rank_that_comes_too_late_or_is_gone_is_an_error_within_the_timeout() -> None:
    with (
        Pool(2, timeout=1) as two,
        pytest.raises(RankError, match=r"psum over axis 'a' failed on its rank 0 of 2: .*Timed out") as raised,
    ):
        two(lambda: never(mesh(a=2).axis("a")), timeout=20)
    assert isinstance(raised.value.__cause__, CollectiveError)
    with Pool(2, timeout=30) as two:
        assert "psum over axis 'a' failed on its rank 0 of 2" in two(told, gone, timeout=20)[0]


def test_more_calls_on_one_rank_are_an_error_there_within_the_timeout() -> None:
    with Pool(2, timeout=1) as two, pytest.raises(RankError, match="psum over axis 'a' failed on its rank 1 of 2") as raised:
        two(lambda: three_to_one(mesh(a=2).axis("a")), timeout=20)
    assert raised.value.rank == 1


def test_another_operation_is_an_error_on_both_ranks_within_the_timeout() -> None:
    with Pool(2, timeout=1) as two:
        first, second = two(told, other_op, timeout=20)
    assert "all_gather over axis 'a' failed on its rank 0 of 2" in first
    assert "psum over axis 'a' failed on its rank 1 of 2" in second


def test_another_size_ends_a_rank() -> None:
    """gloo's choice; check mode makes an error of it."""
    with Pool(2, timeout=5) as two, pytest.raises(RankError, match=r"died|Connection closed"):
        two(lambda: other_size(mesh(a=2).axis("a")), timeout=20)


def test_check_mode_says_who_called_what() -> None:
    def told_checked(call: Any) -> str:
        dist.set_debug_level(dist.DebugLevel.INFO)
        text = told(call)
        assert told(lambda axis: psum(torch.ones(1), axis)) == "no error"  # nothing was started, so all goes on
        return text

    with Pool(2, timeout=5) as two:
        for call, first, second in [
            (other_op, "all_gather of torch.float32 (1, 4)", "psum of torch.float32 (4,)"),
            (other_size, "psum of torch.float32 (4,)", "psum of torch.float32 (5,)"),
            (other_shape, "psum of torch.float32 (3, 2)", "psum of torch.float32 (2, 3)"),
            (other_dtype, "all_gather of torch.float32 (1, 4)", "all_gather of torch.int32 (1, 4)"),
            (other_reduction, "pmax of torch.float32 (4,)", "psum of torch.float32 (4,)"),
            (other_permutation, "ppermute [(0, 0), (1, 1)] of", "ppermute [(0, 1), (1, 0)] of"),
        ]:
            for text in two(told_checked, call, timeout=20):
                assert "ranks of axis 'a' made different calls" in text
                assert f"rank 0: {first}" in text
                assert f"rank 1: {second}" in text


def test_check_mode_changes_no_answer_and_no_trace() -> None:
    def on_rank() -> Tensor:
        dist.set_debug_level(dist.DebugLevel.INFO)
        axis = mesh(a=2).axis("a")
        assert len(make_fx(lambda x: psum(x, axis))(torch.ones(3)).graph.nodes) == 4  # x, all_reduce, wait_tensor, output
        return grad(lambda x: psum(x * x, axis).sum())(torch.ones(3))

    with Pool(2) as two:
        equal(two(on_rank), torch.full((2, 3), 4.0))
