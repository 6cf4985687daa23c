"""What holds of every op: one contract, against the op's own reference in float64."""
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fspeed.ops.interpret import interpreted
from fspeed.ops.op import Op, differentiable

ROUNDINGS = 64.0        # of the largest number: sums of a thousand numbers in another order, with a margin of two


def check_op(op: Op, *args: Any, roundings: float = ROUNDINGS, kernels: bool = True, second: bool = True) -> None:
    """Hold an op to the contract, with these arguments: values and derivatives, purity, batches, traces, and its kernels' values.

        |op(x) - reference(x in float64)| <= roundings eps max|reference|    for results and for gradients
        <c, J t> = <J^T c, t>

    Args:
        op: what `ops.op` made.
        args: its arguments. Results must be tensors, or a tuple of them.
        roundings: the tolerance, in roundings of the dtype of the result, or of an argument's if that is coarser.
        kernels: whether to run the Triton kernels too, by the interpreter.
        second: whether second derivatives are compared too.

    Raises:
        AssertionError: says which part of the contract is broken, and by how much.

    >>> from fspeed.ops.op import op
    >>> double = op("doctest_twice(Tensor x) -> Tensor", lambda x: 2 * x, cuda=lambda x: 2 * x)
    >>> check_op(double, torch.randn(5))
    """
    coarsest = max([torch.finfo(args[i].dtype).eps for i in differentiable(args)], default=0.)
    paths: list[tuple[str, Any]] = [("cpu", contextlib.nullcontext)]
    for path, within in paths + [("kernel", interpreted)] * kernels:
        with within(), poisoned():
            before = [x.clone() if isinstance(x, Tensor) else x for x in args]
            close(f"{path}: values", op(*args), op.reference(*wide(args)), roundings, coarsest)
            close(f"{path}: gradients", gradients(op, args), gradients(op.reference, wide(args)), roundings, coarsest)
            close(f"{path}: the arguments, which it must not write to", floats(args), floats(before), 0)
    adjoint(op, wide(args))
    batches(op, args, roundings, coarsest)
    traces(op, args)
    if second and differentiable(args):
        close("second derivatives", curvature(op, wide(args)), curvature(op.reference, wide(args)), 1e4)


def adjoint(op: Op, args: Sequence[Any]) -> None:
    """<c, J t> == <J^T c, t>."""
    at = differentiable(args)
    if not at:
        return
    f, xs = of_floats(op, args), [args[i] for i in at]
    ts = [torch.randn_like(x) for x in xs]
    out, pushed = torch.func.jvp(f, tuple(xs), tuple(ts))[:2]
    cs = tuple(torch.randn_like(y) for y in out)
    left = sum((c * p).sum() for c, p in zip(cs, pushed, strict=True))
    terms = [g * t for g, t in zip(torch.func.vjp(f, *xs)[1](cs), ts, strict=True)]
    size = sum(t.abs().sum() for t in terms) + 1e-300
    gap = abs(left - sum(t.sum() for t in terms)) / size
    assert gap < 1e-6, f"{op.name}: <c, J t> and <J^T c, t> differ by {gap:.2e} of their terms"


def batches(op: Op, args: Sequence[Any], roundings: float, coarsest: float) -> None:
    """vmap over one argument after another, and over all, is a stack of calls."""
    at = differentiable(args)
    for over in [[i] for i in at] + [at] * (len(at) > 1):
        batch = [torch.stack([x, x.flip(-1) if x.dim() else -x]) if i in over else x for i, x in enumerate(args)]
        dims = tuple(0 if i in over else None for i in range(len(args)))
        one = [op(*[x[row] if i in over else x for i, x in enumerate(batch)]) for row in range(2)]
        want = [torch.stack(same) for same in zip(*map(listed, one), strict=True)]
        close(f"vmap over {over}", listed(torch.vmap(op, dims)(*batch)), want, roundings, coarsest)


def traces(op: Op, args: Sequence[Any]) -> None:
    """A trace on fake tensors records shapes and dtypes as they are, and computes what the op computes."""
    graph = make_fx(lambda *xs: (op(*xs), gradients(op, xs)), tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    eager = floats((op(*args), gradients(op, args)))
    for node, got, want in zip(floats_of(graph), floats(graph(*args)), eager, strict=True):
        for x in (node.meta["val"], got):
            alike = x.shape == want.shape and x.dtype == want.dtype
            assert alike, f"{op.name} traced: {x.shape} {x.dtype}, not {want.shape} {want.dtype}"
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6, equal_nan=True), f"{op.name} traced: other numbers"


def gradients(f: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    """The gradients of sum(cos(i) y_i): no two elements of a result count alike."""
    at = differentiable(args)
    if not at:
        return []
    out, pull = torch.func.vjp(of_floats(f, args), *[args[i] for i in at])[:2]
    return list(pull(tuple(torch.cos(torch.arange(y.numel(), dtype=torch.float64)).to(y).reshape(y.shape) for y in out)))


def curvature(f: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    """The gradients of the gradients' squares."""
    at = differentiable(args)

    def size(*xs: Tensor) -> Tensor:
        full = list(args)
        for i, x in zip(at, xs, strict=True):
            full[i] = x
        return sum((g * g).sum() for g in gradients(f, full))       # type: ignore[return-value]

    return list(torch.func.grad(size, tuple(range(len(at))))(*[args[i] for i in at]))


def of_floats(f: Callable[..., Any], args: Sequence[Any]) -> Callable[..., tuple[Tensor, ...]]:
    """f as a function of its floating arguments alone, with its floating results that have a gradient."""
    at = differentiable(args)

    def of(*xs: Tensor) -> tuple[Tensor, ...]:
        full = list(args)
        for i, x in zip(at, xs, strict=True):
            full[i] = x
        return tuple(y for y in listed(f(*full)) if y.is_floating_point())

    return of


def listed(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def floats(tree: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def floats_of(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """What a graph returns, flat."""
    return [x for x in torch.utils._pytree.tree_leaves(graph.graph.output_node().args[0]) if isinstance(x, torch.fx.Node)]


def wide(args: Sequence[Any]) -> list[Any]:
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]


def close(what: str, got: Any, want: Any, roundings: float, coarsest: float = 0.) -> None:
    """Within so many roundings, of got's dtype or coarser ones, of the largest number wanted."""
    for i, (a, b) in enumerate(zip(floats(got), floats(want), strict=True)):
        assert a.shape == b.shape, f"{what}[{i}]: shape {tuple(a.shape)}, not {tuple(b.shape)}"
        if not a.is_floating_point():
            assert torch.equal(a, b), f"{what}[{i}]: other numbers"
            continue
        finite = b[b.isfinite()].abs()
        scale = max(float(finite.max()), 0.1) if finite.numel() else 0.0        # what is small is a difference of larger numbers
        bound = roundings * max(torch.finfo(a.dtype).eps, coarsest) * scale
        same = (a.double() - b.double()).abs() <= bound
        same |= a.double() == b.double()
        assert bool(same.all()), (
            f"{what}[{i}]: off by {float((a.double() - b.double()).abs().nan_to_num(torch.inf).max()):.3g}, allowed {bound:.3g} "
            f"({roundings:g} roundings of {scale:.3g} in {a.dtype})")


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Within it, memory that nothing was written to holds NaN."""
    settings: Any = torch.utils.deterministic
    fill, strict = settings.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    settings.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warn)
        settings.fill_uninitialized_memory = fill
