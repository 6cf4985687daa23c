"""LAMB in Triton, in two passes. Sums by segment need no atomics, so they are the same in every run.

A segment's sum has one part from each block that it reaches into: of the block where it starts, in `starts[segment]`; of those
that it comes into from the block before, in `heads[block]`.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interpret import on
from ..optimizers.kernel import CONFIG, block, fresh, grid, read, search, write


# ---------------------------------------------------------------- launches
def lamb_moments(
    p: Tensor, g: Tensor, mu: Tensor, nu: Tensor, numbers: Tensor, ends: Tensor, decays: Tensor | None,
    into: tuple[Tensor, ...] | None = None, copy: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    to_mu, to_nu = into or fresh(mu, nu)
    n, computed = p.numel(), torch.promote_types(p.dtype, torch.float32)
    sums = torch.empty(len(ends), 2, dtype=computed, device=p.device)
    heads = torch.empty(triton.cdiv(n, block(n)), 2, dtype=computed, device=p.device)
    if not n:
        return to_mu, to_nu, sums.zero_()
    starts = torch.empty_like(sums)
    with torch.cuda.device_of(p):
        on(moments_kernel, p)[grid(n)](
            p.contiguous(), g.contiguous(), mu.contiguous(), nu.contiguous(), to_mu, to_nu, numbers.to(computed).contiguous(),
            ends.contiguous(), decays if decays is None else decays.contiguous(), starts, heads, n, len(ends) - 1,
            BLOCK=block(n), **CONFIG)
        on(total_kernel, p)[(len(ends),)](ends.contiguous(), starts, heads, sums, n, len(ends) - 1, block(n), MANY=1024, **CONFIG)
    return to_mu, to_nu, sums


def lamb_step(
    p: Tensor, mu: Tensor, nu: Tensor, sums: Tensor, numbers: Tensor, ends: Tensor, decays: Tensor | None, key: Tensor | None,
    start: int, into: tuple[Tensor, ...] | None = None, copy: Tensor | None = None,
) -> Tensor:
    to_p, = into or fresh(p)
    n, computed = p.numel(), torch.promote_types(p.dtype, torch.float32)
    if n:
        with torch.cuda.device_of(p):
            on(step_kernel, p)[grid(n)](
                p.contiguous(), mu.contiguous(), nu.contiguous(), to_p, copy, sums.to(computed).contiguous(),
                numbers.to(computed).contiguous(), ends.contiguous(), decays if decays is None else decays.contiguous(),
                key if p.dtype == torch.bfloat16 else None, start, n, len(ends) - 1, BLOCK=block(n), **CONFIG)
    return to_p


# ---------------------------------------------------------------- kernels
@triton.jit(do_not_specialize=["last"])
def moments_kernel(p, g, mu, nu, to_mu, to_nu, numbers, ends, decays, starts, heads, n, last, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    P, G, M, N = read(p, i, n), read(g, i, n), read(mu, i, n), read(nu, i, n)
    b1, a1, b2, a2 = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    G = tl.load(numbers + 4) * G
    M = b1 * M + a1 * G
    N = b2 * N + a2 * G * G
    tl.store(to_mu + i, M.to(to_mu.dtype.element_ty), i < n)
    tl.store(to_nu + i, N.to(to_nu.dtype.element_ty), i < n)
    A = adam(M, N, numbers)

    # one segment after another: the first may have begun before this block, the others begin in it
    s = search(ends, last, first)
    begin = tl.maximum(s - 1, 0)
    inherited = (first > 0) & ((s == 0) | (tl.load(ends + begin) < first))
    to = heads + 2 * tl.program_id(0) if inherited else starts + 2 * s
    low, stop = first, tl.minimum(first + BLOCK, n)
    going = first < stop
    while going:
        end = stop if s == last else tl.minimum(tl.load(ends + s), stop)
        here = (i >= low) & (i < end)
        U = A + decay_of(numbers, decays, s) * P
        tl.store(to, tl.sum(tl.where(here, P * P, 0.0), 0))
        tl.store(to + 1, tl.sum(tl.where(here, U * U, 0.0), 0))
        s += 1
        to = starts + 2 * s
        low = end
        going = end < stop


@triton.jit(do_not_specialize=["last", "n", "size"])
def total_kernel(ends, starts, heads, sums, n, last, size, MANY: tl.constexpr):
    """A segment's sum: of where it starts, and of the heads of blocks up to its end."""
    s = tl.program_id(0)
    begin = tl.where(s == 0, 0, tl.minimum(tl.load(ends + tl.maximum(s - 1, 0)), n))
    end = tl.where(s == last, n, tl.minimum(tl.load(ends + s), n))
    a, b = tl.zeros((MANY,), sums.dtype.element_ty), tl.zeros((MANY,), sums.dtype.element_ty)
    at, stop = begin // size + 1, tl.cdiv(end, size)
    while at < stop:
        i = at + tl.arange(0, MANY)
        a += tl.load(heads + 2 * i, i < stop, 0)
        b += tl.load(heads + 2 * i + 1, i < stop, 0)
        at += MANY
    some = begin < end
    tl.store(sums + 2 * s, tl.sum(a, 0) + tl.load(starts + 2 * s, some, 0))
    tl.store(sums + 2 * s + 1, tl.sum(b, 0) + tl.load(starts + 2 * s + 1, some, 0))


@triton.jit(do_not_specialize=["start", "last"])
def step_kernel(p, mu, nu, to_p, copy, sums, numbers, ends, decays, key, start, n, last, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    P = read(p, i, n)
    A = adam(read(mu, i, n), read(nu, i, n), numbers)
    s = search(ends, last, first)
    stop = tl.minimum(first + BLOCK, n)
    rate = tl.full((BLOCK,), 1.0, P.dtype) * rate_of(numbers, sums, s)
    decay = tl.full((BLOCK,), 1.0, P.dtype) * decay_of(numbers, decays, s)
    end = tl.load(ends + s)
    while (end < stop) & (s < last):
        s += 1
        rate = tl.where(i >= end, rate_of(numbers, sums, s), rate)
        decay = tl.where(i >= end, decay_of(numbers, decays, s), decay)
        end = tl.load(ends + s)
    write(to_p, copy, P - rate * (A + decay * P), key, start, first, i, n, BLOCK)


# ---------------------------------------------------------------- what they share
@triton.jit
def adam(M, N, numbers):
    return tl.load(numbers + 5) * M / (tl.sqrt(N) + tl.load(numbers + 6))


@triton.jit
def decay_of(numbers, decays, s):
    decay = tl.load(numbers + 7)
    return decay if decays is None else decay * tl.load(decays + s)


@triton.jit
def rate_of(numbers, sums, s):
    """The rate times the segment's ratio, which NaN passes through."""
    of_p, of_u = tl.load(sums + 2 * s), tl.load(sums + 2 * s + 1)
    least, most = tl.load(numbers + 9), tl.load(numbers + 10)
    ratio = tl.sqrt(of_p) / tl.sqrt(of_u)
    ratio = tl.where(ratio < least, least, tl.where(ratio > most, most, ratio))
    return tl.load(numbers + 8) * tl.where((of_p == 0) | (of_u == 0), 1.0, ratio)
