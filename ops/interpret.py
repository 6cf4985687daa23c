"""Triton kernels on CPU tensors, by Triton's interpreter, one launch at a time, in a process that also compiles them.

Mends on the way what the interpreter of Triton 3.6 to 3.9 gets wrong: kernels that call kernels, autotuned kernels without a
driver, and bfloat16, which it computes on as if its bits were integers and casts by cutting them off.
"""
import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

_INTERPRETED: ContextVar[bool] = ContextVar("interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within it, ops take their GPU path on CPU tensors too, by Triton's interpreter: to test values without a GPU.

    >>> with interpreted():
    ...     print(interpreting())
    True
    """
    token = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(token)


def interpreting() -> bool:
    return _INTERPRETED.get()


def on(kernel: Any, like: Tensor) -> Any:
    """The kernel as it is launched where a tensor is: `on(kernel, x)[grid](x, ...)`."""
    return _Interpreted(kernel) if like.device.type == "cpu" else kernel


class _Interpreted:
    """A kernel that is launched as compiled ones are."""

    def __init__(self, kernel: Any) -> None:
        from triton.runtime.autotuner import Autotuner, Heuristics
        self.heuristics: list[dict[str, Callable[[dict], Any]]] = []
        self.config: dict[str, Any] = {}
        while isinstance(kernel, (Autotuner, Heuristics)):
            if isinstance(kernel, Autotuner):
                self.config.update(kernel.configs[0].kwargs)
            else:
                self.heuristics.append(kernel.values)
            kernel = kernel.fn
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            named = {**self.config, **{name: value for name, value in named.items() if name not in OPTIONS}}
            for values in self.heuristics:
                given = {**dict(zip(self.kernel.arg_names, args, strict=False)), **named}
                named.update({name: value(given) for name, value in values.items()})
            with _calls_interpreted(), np.errstate(all="ignore"):
                _function(self.kernel)[grid](*args, **named)

        return launch


OPTIONS = frozenset(("num_warps", "num_stages", "num_ctas", "maxnreg"))


def _function(kernel: Any) -> Any:
    """By identity: a kernel's hash reads what it calls, which while one is interpreted are the interpreter's own functions."""
    from triton.runtime.interpreter import InterpretedFunction
    _mend()
    if isinstance(kernel, InterpretedFunction):
        return kernel
    if id(kernel) not in _FUNCTIONS:
        _FUNCTIONS[id(kernel)] = kernel, InterpretedFunction(kernel.fn)
    return _FUNCTIONS[id(kernel)][1]


_FUNCTIONS: dict[int, tuple[Any, Any]] = {}


@contextlib.contextmanager
def _calls_interpreted() -> Iterator[None]:
    """Within it a kernel that a kernel calls is interpreted too."""
    from triton.runtime.jit import JITFunction
    before = JITFunction.__call__
    JITFunction.__call__ = _call
    try:
        yield
    finally:
        JITFunction.__call__ = before


def _call(kernel: Any, *args: Any, **named: Any) -> Any:
    """A kernel called by an interpreted one; what the interpreter puts in the place of Triton's language goes when it returns."""
    from triton.runtime import interpreter
    called = _function(kernel)
    scope = interpreter._patch_lang(called.fn)
    try:
        return called.rewrite()(*args, **named)
    finally:
        if scope is not None:
            scope.restore()


@cache
def _mend() -> None:
    """bfloat16 in the interpreter: computed in float32 and rounded to the nearest, ties to even."""
    import triton.language as tl
    from triton.runtime import interpreter
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, binary, unary, cast, fp_to_fp = (
        getattr(builder, name) for name in ("create_dot", "binary_op", "unary_op", "cast_impl", "create_fp_to_fp"))
    is_bf16 = lambda x: x.dtype.scalar == tl.bfloat16
    widened = lambda x: interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None).view(np.float32) if is_bf16(x) else x.data
    narrow = lambda x: handle(_round_to_bf16(x), tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if not (is_bf16(a) or is_bf16(b)):
            return dot(self, a, b, d, *rest)
        return handle(np.matmul(widened(a), widened(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def binary_op(self: Any, a: Any, b: Any, op: Any) -> Any:
        if not (is_bf16(a) and is_bf16(b)):
            return binary(self, a, b, op)
        out = op(widened(a), widened(b))
        return handle(out, tl.int1) if out.dtype == np.bool_ else narrow(out)

    def unary_op(self: Any, x: Any, op: Any) -> Any:
        return narrow(op(widened(x))) if is_bf16(x) else unary(self, x, op)

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        if x.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            return narrow(x.data)
        if is_bf16(x) and to.scalar not in (tl.bfloat16, tl.float32):
            return cast(self, handle(widened(x), tl.float32), to)
        return cast(self, x, to)

    def create_fp_to_fp(self: Any, x: Any, to: Any, rounding: Any) -> Any:
        to_bf16 = x.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16 and rounding is None
        return narrow(x.data) if to_bf16 else fp_to_fp(self, x, to, rounding)

    builder.create_dot, builder.binary_op, builder.unary_op = create_dot, binary_op, unary_op
    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    builder.get_bf16 = lambda self, value: narrow(np.array([value], np.float32))


def _round_to_bf16(x: Any) -> Any:
    """The bits of float32 numbers as bfloat16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype(np.uint16))
