"""AdamW with moments of 8 bits in Triton: a program makes some blocks, each of which it reads once and writes once."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compress.kernel import divided, launch, nearest, places, spread
from ..optimizers.kernel import fresh, read, weight, wide, write
from .reference import BLOCK


def adamw8bit(
    p: Tensor, g: Tensor, mu: Tensor, nu: Tensor, mu_scale: Tensor, nu_scale: Tensor, numbers: Tensor, ends: Tensor | None,
    decays: Tensor | None, key: Tensor | None, start: int, into: tuple[Tensor, ...] | None = None, copy: Tensor | None = None,
) -> tuple[Tensor, ...]:
    into = into or fresh(p, mu, nu, mu_scale, nu_scale)
    last = 0 if ends is None or decays is None else len(ends) - 1
    dense = lambda x: x if x is None else x.contiguous()
    with torch.cuda.device_of(p):
        launch(
            adamw8bit_kernel, p, BLOCK, *map(dense, (p, g, mu, nu, mu_scale, nu_scale)), *into, copy,
            numbers.to(torch.promote_types(p.dtype, torch.float32)).contiguous(), dense(ends), dense(decays),
            key if p.dtype == torch.bfloat16 else None, start, p.numel(), last)
    return into


@triton.jit(do_not_specialize=["start", "last"])
def adamw8bit_kernel(
    p, g, mu, nu, mu_scale, nu_scale, to_p, to_mu, to_nu, to_mu_scale, to_nu_scale, copy, numbers, ends, decays, key, start, n,
    last, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    first, i = places(ROWS, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < tl.cdiv(n, BLOCK)
    P, G = read(p, i, n), read(g, i, n)
    M = tl.load(mu + i, i < n, 0).to(tl.float32) * (1 / 127)
    N = tl.load(nu + i, i < n, 0).to(tl.float32) * (1 / 255)
    M = M * tl.abs(M) * spread(wide(tl.load(mu_scale + row, inside, 0)), ROWS, BLOCK)
    N = N * N * (N * N) * spread(wide(tl.load(nu_scale + row, inside, 0)), ROWS, BLOCK)
    b1, a1, b2, a2 = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    rate, eps, decay = tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6)
    G = tl.load(numbers + 7) * G
    M = b1 * M + a1 * G
    N = b2 * N + a2 * G * G
    P = (1 - decay * weight(ends, decays, last, first, i, n, ROWS * BLOCK)) * P - rate * M / (tl.sqrt(N) + eps)
    write(to_p, copy, P, key, start, first, i, n, ROWS * BLOCK)

    of_m, of_n = largest(tl.abs(M), ROWS, BLOCK), largest(N, ROWS, BLOCK)
    tl.store(to_mu_scale + row, of_m.to(to_mu_scale.dtype.element_ty), inside)
    tl.store(to_nu_scale + row, of_n.to(to_nu_scale.dtype.element_ty), inside)
    q = rounded(tl.sqrt(divided(tl.abs(M), spread(tl.where(of_m == 0, 1.0, of_m), ROWS, BLOCK))) * 127)
    tl.store(to_mu + i, tl.where(M < 0, -q, q).to(tl.int8), i < n)
    q = rounded(tl.sqrt(tl.sqrt(divided(N, spread(tl.where(of_n == 0, 1.0, of_n), ROWS, BLOCK)))) * 255)
    tl.store(to_nu + i, tl.where(N > 0, tl.maximum(q, 1), 0).to(tl.uint8), i < n)


@triton.jit
def largest(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of each block; infinite if a number is NaN."""
    return tl.max(tl.reshape(tl.where(x == x, x, float("inf")), (ROWS, BLOCK)), 1)


@triton.jit
def rounded(q):
    return nearest(tl.where(q == q, q, 0.0).to(tl.float32)).to(tl.int32)
