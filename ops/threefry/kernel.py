"""Threefry2x32 in Triton: the counter is made, hashed and finished in registers; only the result is written."""
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from .cpu import shape

BLOCK = 1024


def pairs(key: Tensor, start: int | Tensor, n: int) -> Tensor:
    return launch("pairs", key, start, n, (*shape(start, n), 2), torch.int32)


def bits(key: Tensor, start: int | Tensor, n: int) -> Tensor:
    return launch("bits", key, start, n, shape(start, n), torch.int32)


def uniform(key: Tensor, start: int | Tensor, n: int) -> Tensor:
    return launch("uniform", key, start, n, shape(start, n), torch.float32)


def launch(kind: str, key: Tensor, start: int | Tensor, n: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with temporarily_clear_interpreter_stack(), torch.cuda.device_of(key):     # torch.func wraps what is allocated under it
        out = torch.empty(size, dtype=dtype, device=key.device)
        starts = start.reshape(-1) if isinstance(start, Tensor) else torch.full((1,), start, dtype=torch.int64, device=key.device)
        draws = len(starts) * n
        if draws:
            grid = (triton.cdiv(draws, BLOCK),)
            draw[grid](key.contiguous(), starts.contiguous(), out, n, draws, kind, n > 1 << 30, BLOCK)
        return out


@triton.jit(do_not_specialize=["n", "draws"])
def draw(key, starts, out, n, draws, KIND: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    row, column = first // n, first % n                # in 64 bits once a block; within it 32 bits do, unless rows are LONG
    if not LONG:
        column, n = column.to(tl.int32), n.to(tl.int32)
    column = column + tl.arange(0, BLOCK)
    at = first + tl.arange(0, BLOCK)
    inside = at < draws
    counts = tl.load(starts + row + column // n, inside, 0) + column % n
    k0, k1 = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    x0, x1 = threefry2x32(k0, k1, (counts >> 32).to(tl.uint32), counts.to(tl.uint32))
    if KIND == "pairs":
        tl.store(out + 2 * at, x0.to(tl.int32), inside)
        tl.store(out + 2 * at + 1, x1.to(tl.int32), inside)
    elif KIND == "bits":
        tl.store(out + at, (x0 ^ x1).to(tl.int32), inside)
    else:
        tl.store(out + at, ((x0 ^ x1) >> 9).to(tl.float32) * 2**-23, inside)


@triton.jit
def threefry2x32(k0, k1, x0, x1):
    k2 = k0 ^ k1 ^ 0x1BD11BDA
    x0, x1 = mix(x0 + k0, x1 + k1, 13, 15, 26, 6)
    x0, x1 = mix(x0 + k1, x1 + k2 + 1, 17, 29, 16, 24)
    x0, x1 = mix(x0 + k2, x1 + k0 + 2, 13, 15, 26, 6)
    x0, x1 = mix(x0 + k0, x1 + k1 + 3, 17, 29, 16, 24)
    x0, x1 = mix(x0 + k1, x1 + k2 + 4, 13, 15, 26, 6)
    return x0 + k2, x1 + k0 + 5


@triton.jit
def mix(x0, x1, r0: tl.constexpr, r1: tl.constexpr, r2: tl.constexpr, r3: tl.constexpr):
    x0 += x1
    x1 = (x1 << r0 | x1 >> (32 - r0)) ^ x0
    x0 += x1
    x1 = (x1 << r1 | x1 >> (32 - r1)) ^ x0
    x0 += x1
    x1 = (x1 << r2 | x1 >> (32 - r2)) ^ x0
    x0 += x1
    x1 = (x1 << r3 | x1 >> (32 - r3)) ^ x0
    return x0, x1
