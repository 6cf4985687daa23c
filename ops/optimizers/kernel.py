"""Optimizers in Triton: every element is read once and written once, whatever happens to it in between."""
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interpret import interpreting, on
from ..threefry.kernel import threefry2x32

CONFIG = dict(num_warps=4)


# ---------------------------------------------------------------- launches
def adamw(
    p: Tensor, g: Tensor, mu: Tensor, nu: Tensor, numbers: Tensor, ends: Tensor | None, decays: Tensor | None, key: Tensor | None,
    start: int, into: tuple[Tensor, ...] | None = None, copy: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return launch(adamw_kernel, (p, g, mu, nu), into or fresh(p, mu, nu), numbers, (ends, decays), key, start, copy)


def lion(
    p: Tensor, g: Tensor, mu: Tensor, numbers: Tensor, ends: Tensor | None, decays: Tensor | None, key: Tensor | None, start: int,
    into: tuple[Tensor, ...] | None = None, copy: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return launch(lion_kernel, (p, g, mu), into or fresh(p, mu), numbers, (ends, decays), key, start, copy)


def sgd_momentum(
    p: Tensor, g: Tensor, trace: Tensor, numbers: Tensor, key: Tensor | None, start: int, nesterov: bool,
    into: tuple[Tensor, ...] | None = None, copy: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return launch(sgd_kernel, (p, g, trace), into or fresh(p, trace), numbers, (), key, start, copy, NESTEROV=nesterov)


def launch(
    kernel: Any, reads: tuple[Tensor, ...], into: tuple[Tensor, ...], numbers: Tensor, segments: tuple, key: Tensor | None,
    start: int, copy: Tensor | None, **constants: Any,
) -> tuple[Tensor, ...]:
    p = reads[0]
    if p.numel():
        last = len(segments[0]) - 1 if segments and segments[1] is not None else 0
        segments = tuple(x if x is None else x.contiguous() for x in segments)
        numbers = numbers.to(torch.promote_types(p.dtype, torch.float32)).contiguous()
        with torch.cuda.device_of(p):
            on(kernel, p)[grid(p.numel())](
                *[x.contiguous() for x in reads], *into, copy, numbers, *segments, key if p.dtype == torch.bfloat16 else None,
                start, p.numel(), *[last] * bool(segments), BLOCK=block(p.numel()), **constants, **CONFIG)
    return into


def fresh(*xs: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs)


def elements(amd: bool) -> int:
    """A program's: 8 a thread, 128 bits of each bucket in bfloat16 and twice that in float32. AMD's warps are of 64 threads."""
    return 2048 if amd else 1024


def block(n: int) -> int:
    """The interpreter takes as long for a program of any size."""
    least = elements(torch.version.hip is not None)
    return max(least, triton.next_power_of_2(min(n, 1 << 20))) if interpreting() else least


def grid(n: int) -> tuple[int]:
    return (triton.cdiv(n, block(n)),)


# ---------------------------------------------------------------- kernels
@triton.jit(do_not_specialize=["start", "last"])
def adamw_kernel(
    p, g, mu, nu, to_p, to_mu, to_nu, copy, numbers, ends, decays, key, start, n, last, BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    P, G, M, N = read(p, i, n), read(g, i, n), read(mu, i, n), read(nu, i, n)
    b1, a1, b2, a2 = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    rate, eps, decay = tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6)
    G = tl.load(numbers + 7) * G
    M = b1 * M + a1 * G
    N = b2 * N + a2 * G * G
    P = (1 - decay * weight(ends, decays, last, first, i, n, BLOCK)) * P - rate * M / (tl.sqrt(N) + eps)
    write(to_p, copy, P, key, start, first, i, n, BLOCK)
    tl.store(to_mu + i, M.to(to_mu.dtype.element_ty), i < n)
    tl.store(to_nu + i, N.to(to_nu.dtype.element_ty), i < n)


@triton.jit(do_not_specialize=["start", "last"])
def lion_kernel(p, g, mu, to_p, to_mu, copy, numbers, ends, decays, key, start, n, last, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    P, G, M = read(p, i, n), read(g, i, n), read(mu, i, n)
    b1, a1, b2, a2 = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    rate, decay = tl.load(numbers + 4), tl.load(numbers + 5)
    G = tl.load(numbers + 6) * G
    U = a1 * G + b1 * M
    U = tl.where(U > 0, 1.0, tl.where(U < 0, -1.0, U))
    P = (1 - decay * weight(ends, decays, last, first, i, n, BLOCK)) * P - rate * U
    write(to_p, copy, P, key, start, first, i, n, BLOCK)
    tl.store(to_mu + i, (b2 * M + a2 * G).to(to_mu.dtype.element_ty), i < n)


@triton.jit(do_not_specialize=["start"])
def sgd_kernel(p, g, trace, to_p, to_trace, copy, numbers, key, start, n, NESTEROV: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    P, G, T = read(p, i, n), read(g, i, n), read(trace, i, n)
    decay, rate = tl.load(numbers), tl.load(numbers + 1)
    G = tl.load(numbers + 2) * G
    T = G + decay * T
    P = P - rate * (G + decay * T if NESTEROV else T)
    write(to_p, copy, P, key, start, first, i, n, BLOCK)
    tl.store(to_trace + i, T.to(to_trace.dtype.element_ty), i < n)


# ---------------------------------------------------------------- what they share
@triton.jit
def read(x, i, n):
    """Elements in at least float32."""
    return wide(tl.load(x + i, i < n, 0))


@triton.jit
def wide(x):
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def weight(ends, values, last, first, i, n, BLOCK: tl.constexpr):
    """The value of each element's segment, 1 without segments. A block within one segment costs one search and one read."""
    if values is None:
        return tl.full((BLOCK,), 1.0, tl.float32)
    s = search(ends, last, first)
    w = tl.full((BLOCK,), 1.0, tl.float32) * tl.load(values + s)
    stop = tl.minimum(first + BLOCK, n)
    end = tl.load(ends + s)
    while (end < stop) & (s < last):
        s += 1
        w = tl.where(i >= end, tl.load(values + s), w)
        end = tl.load(ends + s)
    return w


@triton.jit
def search(ends, last, i):
    """The first segment that ends behind i, or the last one."""
    low = tl.zeros((), tl.int32)
    high = low + last
    while low < high:
        middle = (low + high) // 2
        behind = tl.load(ends + middle) > i
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, middle + 1)
    return low


@triton.jit
def write(to, copy, x, key, start, first, i, n, BLOCK: tl.constexpr):
    """x in the bucket's dtype, rounded by a key if there is one, and a copy in the copy's."""
    if key is not None:
        x = round_by_key(x, key, start + first, BLOCK)
    x = x.to(to.dtype.element_ty)
    tl.store(to + i, x, i < n)
    if copy is not None:
        tl.store(copy + i, x.to(copy.dtype.element_ty), i < n)


@triton.jit
def round_by_key(x, key, position, BLOCK: tl.constexpr):
    """x as a bfloat16 number, up or down by 16 random bits."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = tl.where((bits & 0x7F800000) == 0x7F800000, bits, bits + draws16(key, position, BLOCK))
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def draws16(key, position, BLOCK: tl.constexpr):
    """16 random bits at each position: a quarter of the hash of position // 4; 4 divides position."""
    count = position // 4 + tl.arange(0, BLOCK // 4)
    k0, k1 = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    x0, x1 = threefry2x32(k0, k1, (count >> 32).to(tl.uint32), count.to(tl.uint32))
    return tl.interleave(tl.interleave(x0 & 0xFFFF, x1 & 0xFFFF), tl.interleave(x0 >> 16, x1 >> 16))
