"""An op: a function on tensors with kernels of its own, right under every transform of torch.func, in traces and in torch.compile.

An op is registered with the dispatcher without derivatives, so that traces and fake tensors see one call, and that call stands in
an `autograd.Function`, whose derivatives are the op's own backward, itself such an op. All that kernels have not is taken from the
plain reference: forward mode, batches, and the derivatives of the backward.
"""
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from .interpret import interpreting

Function = Callable[..., Any]
NAMESPACE = "fspeed"


@dataclass(frozen=True)
class Op:
    """A function with its parts: what `op` makes and tests take apart."""
    name: str
    reference: Function
    cpu: Function
    cuda: Function
    apply: Function
    backward: "Op | None" = None

    def __call__(self, *args: Any) -> Any:
        return self.apply(*args)


@dataclass(frozen=True)
class Paths:
    """A function's implementations: on the CPU (the reference, if None), on a GPU, and its vmap rule (the reference's, if None)."""
    cpu: Function | None
    cuda: Function
    vmap: Function | None = None


def op(
    schema: str, reference: Function, cuda: Function, cpu: Function | None = None, *, backward: Paths | None = None,
    fake: Function | None = None, vmap: Function | None = None, saves: int = 0, alike: dict[int, int | None] | None = None,
) -> Op:
    """A function on tensors with a kernel for GPUs, a path for CPUs and a plain reference, differentiable to any order.

    Args:
        schema: name and arguments as in PyTorch's operator schemas, tensors (or `Tensor?`) first, without default values, as in
            `"scale(Tensor x, float by) -> Tensor"`. Several results are `-> (Tensor, Tensor)`.
        reference: the function in plain operations of PyTorch. It says what is right, derivatives included.
        cuda, cpu: the same function on tensors of one device, without derivatives. They return new contiguous tensors, and get
            tensors as they are: strided, or empty. `cpu` is the reference if None.
        backward: `(grads, inputs, outputs) -> grads of the inputs` on each device, a tensor for each input that is a floating-point
            tensor, in their order. `grads` are of the outputs that are not saved. If None, the reference's, in plain operations.
        fake: the shapes of the result, on fake tensors; by default what the reference says.
        vmap: `(info, in_dims, *args) -> (out, out_dims)`, as `torch.autograd.Function` takes it; by default the reference, batched.
        saves: how many of the last outputs are there for `backward` alone: they have no gradient.
        alike: inputs whose gradient is one that is there already, which `backward` leaves out: `{i: k}`, input i's is input k's, or
            `{i: ~j}`, it is output j's (an operator of PyTorch would have to return a copy); or `{i: None}`, input i is a constant.

    Returns:
        A function of positional arguments.

    >>> double = op("doctest_double(Tensor x) -> Tensor", lambda x: 2 * x, cuda=lambda x: 2 * x)
    >>> torch.func.grad(lambda x: double(x) ** 2)(torch.tensor(3.))
    tensor(24.)
    """
    name = schema.partition("(")[0]
    raw = register(schema, cpu or reference, cuda, fake or reference)
    alike = alike or {}
    pull = _backward_op(name, reference, raw, saves, alike, backward)

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        ctx.shown = len(results) - saves
        remember(ctx, inputs, results)
        ctx.mark_non_differentiable(*results[ctx.shown:], *[t for t in results[: ctx.shown] if not t.is_floating_point()])
        ctx.set_materialize_grads(False)

    def backward_(ctx: Any, *grads: Tensor | None) -> Any:
        inputs, outputs = recall(ctx)
        if all(g is None for g in grads[: ctx.shown]):
            return (None,) * len(inputs)
        filled = [torch.zeros_like(o) if g is None else g for g, o in zip(grads, outputs[: ctx.shown], strict=False)]
        out: list[Any] = [None] * len(inputs)
        for i, g in zip(distinct(inputs, alike), pull(*filled, *outputs, *inputs), strict=True):
            out[i] = g
        for i, k in alike.items():
            out[i] = None if k is None else out[k] if k >= 0 else filled[~k]
        return tuple(out)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        inputs, outputs = recall(ctx)
        found = iter(reference_jvp(reference, inputs, tangents, ctx.shown))
        moved = [next(found) if i < ctx.shown and y.is_floating_point() else None for i, y in enumerate(outputs)]
        return tuple(moved) if len(moved) > 1 else moved[0]

    call = function(name, raw, setup_context, backward_, jvp, vmap or batches(reference))
    return Op(name, reference, cpu or reference, cuda, call, pull)


def _backward_op(name: str, reference: Function, raw: Any, saves: int, alike: dict[int, int | None], paths: Paths | None) -> Op:
    """The backward as an op of (*grads, *outputs, *inputs), whose own derivatives are those of the reference's."""
    results = len(raw._schema.returns)
    shown = results - saves
    declared = [f"Tensor grad{i}" for i in range(shown)] + [f"Tensor out{i}" for i in range(results)]
    declared += [str(raw._schema).partition("(")[2].rpartition(") -> ")[0]]
    split = lambda args: (args[:shown], args[shown + results :], args[shown : shown + results])

    def plain(*args: Any) -> list[Tensor]:
        grads, inputs, _ = split(args)
        return reference_backward(reference, grads, inputs, shown, alike)

    def fake(*args: Any) -> list[Tensor]:
        _, inputs, _ = split(args)
        return [torch.empty_like(inputs[i], memory_format=torch.contiguous_format) for i in distinct(inputs, alike)]

    def path(function: Function | None) -> Function:
        return plain if function is None else lambda *args: list(function(*split(args)))

    cpu, cuda = (path(paths.cpu), path(paths.cuda)) if paths else (plain, plain)
    raw_backward = register(f"{name}_backward({', '.join(declared)}) -> Tensor[]", cpu, cuda, fake) if paths else plain

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        remember(ctx, inputs, ())
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        args, _ = recall(ctx)
        if all(g is None for g in grads):
            return (None,) * len(args)
        at = [i for i in differentiable(args) if not shown <= i < shown + results]

        def of(*xs: Tensor) -> list[Tensor]:
            full = list(args)
            for i, x in zip(at, xs, strict=True):
                full[i] = x
            return [g for g, given in zip(plain(*full), grads, strict=True) if given is not None]

        pulled = torch.func.vjp(of, *[args[i] for i in at])[1]([g for g in grads if g is not None])
        out: list[Any] = [None] * len(args)
        for i, g in zip(at, pulled, strict=True):
            out[i] = g
        return tuple(out)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        args, _ = recall(ctx)
        return reference_jvp(lambda *a: tuple(plain(*a)), args, tangents, None)

    forward = lambda *args: tuple(raw_backward(*args))
    vmap = paths.vmap if paths and paths.vmap else batches(lambda *a: tuple(plain(*a)))
    call = function(f"{name}_backward", forward, setup_context, backward, jvp, vmap)
    return Op(f"{name}_backward", plain, cpu, cuda, call)


def plain_on_cpu(op: Op) -> Function:
    """The op; but on the CPU its reference as it stands: for ops that no path of their own makes faster there.

    Autograd then keeps what it likes, and a compiler fuses the operations with what is around them.
    """
    def call(*args: Any) -> Any:
        return op(*args) if args[0].device.type != "cpu" or interpreting() else op.reference(*args)

    return call


def of_kernel(package: str, name: str) -> Function:
    """The function `name` of a package's kernel.py, imported when first called: Triton is not everywhere, and slow to import.

        cuda=of_kernel(__package__, "forward")
    """
    return lambda *args, **named: getattr(importlib.import_module(".kernel", package), name)(*args, **named)


def register(schema: str, cpu: Function, cuda: Function, fake: Function) -> Any:
    """The op `fspeed::name`, without derivatives: what a trace records."""
    library = _library()
    library.define(schema)
    name = schema.partition("(")[0]
    library.impl(name, lambda *args: bare(cuda if interpreting() else cpu, args), "CPU")
    library.impl(name, lambda *args: bare(cuda, args), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def bare(function: Function, args: Sequence[Any]) -> Any:
    """function(*args) on numbers: no level of torch.func wraps what is allocated, nothing is remembered for a derivative."""
    with temporarily_clear_interpreter_stack(), torch.no_grad():
        return function(*args)


def _library() -> torch.library.Library:
    global _LIBRARY
    if _LIBRARY is None:
        _LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
    return _LIBRARY


_LIBRARY: torch.library.Library | None = None


def function(name: str, forward: Function, setup_context: Function, backward: Function, jvp: Function, vmap: Function) -> Function:
    """The `autograd.Function` of these parts, as torch.compile leaves it whole."""
    parts = dict(forward=lambda *args: forward(*args), setup_context=setup_context, backward=backward, jvp=jvp, vmap=vmap)
    made: Any = type(name, (torch.autograd.Function,), {key: staticmethod(part) for key, part in parts.items()})
    apply = made.apply

    def call(*args: Any) -> Any:
        return apply(*args)

    return torch._dynamo.allow_in_graph(call)


def batches(reference: Function) -> Function:
    """A vmap rule: the reference, batched."""
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
        out = torch.vmap(reference, in_dims, randomness=info.randomness)(*args)
        return out, (0,) * len(out) if isinstance(out, tuple) else 0

    return vmap


def one_by_one(function: Function) -> Function:
    """A vmap rule: the op itself, on one of the batch after another."""
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
        pick = lambda i: [x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True)]
        outs = [function(*pick(i)) for i in range(info.batch_size)]
        if isinstance(outs[0], tuple):
            return tuple(torch.stack(same) for same in zip(*outs, strict=True)), (0,) * len(outs[0])
        return torch.stack(outs), 0

    return vmap


def differentiable(inputs: Sequence[Any]) -> list[int]:
    """Which inputs have a gradient: tensors in floating point."""
    return [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.is_floating_point()]


def distinct(inputs: Sequence[Any], alike: dict[int, int | None]) -> list[int]:
    """Which inputs have a gradient of their own."""
    return [i for i in differentiable(inputs) if i not in alike]


def remember(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> None:
    """Keep inputs and outputs for `recall`."""
    tensors = [x for x in (*inputs, *outputs) if isinstance(x, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.inputs = [None if isinstance(x, Tensor) else (x,) for x in inputs]


def recall(ctx: Any) -> tuple[list[Any], list[Tensor]]:
    tensors = iter(ctx.saved_tensors)
    inputs = [next(tensors) if x is None else x[0] for x in ctx.inputs]
    return inputs, list(tensors)


def shown_of(reference: Function, shown: int | None) -> Function:
    """The reference's results that have derivatives: in floating point, and not only saved."""
    def of(*args: Any) -> tuple[Tensor, ...]:
        out = reference(*args)
        out = tuple(out)[:shown] if isinstance(out, (tuple, list)) else (out,)
        return tuple(y for y in out if y.is_floating_point())

    return of


def reference_backward(
    reference: Function, grads: Sequence[Tensor], inputs: Sequence[Any], shown: int, alike: dict[int, int | None],
) -> list[Tensor]:
    """The gradients of the inputs, from the reference's vjp."""
    wanted = distinct(inputs, alike)

    def of(*xs: Tensor) -> tuple[Tensor, ...]:
        full = list(inputs)
        for i, x in zip(wanted, xs, strict=True):
            full[i] = x
        return shown_of(reference, shown)(*full)

    return list(torch.func.vjp(of, *[inputs[i] for i in wanted])[1](tuple(g for g in grads if g.is_floating_point())))


def reference_jvp(reference: Function, inputs: Sequence[Any], tangents: Sequence[Any], shown: int | None) -> tuple[Tensor, ...]:
    """The tangents of the results that have derivatives, from the reference's jvp."""
    moving = [i for i in differentiable(inputs) if tangents[i] is not None]

    def of(*xs: Tensor) -> tuple[Tensor, ...]:
        full = list(inputs)
        for i, x in zip(moving, xs, strict=True):
            full[i] = x
        return shown_of(reference, shown)(*full)

    return torch.func.jvp(of, tuple(inputs[i] for i in moving), tuple(tangents[i] for i in moving))[1]
