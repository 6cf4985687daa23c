"""The sum of squares in Triton: each program of a fixed grid sums block after block, and their sums are summed in order."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interpret import interpreting, on
from ..optimizers.kernel import elements, read

PROGRAMS = 2048         # some on each multiprocessor, few enough that one block sums up what they found
CONFIG = dict(num_warps=4)


def sum_of_squares(x: Tensor) -> Tensor:
    computed, n = torch.promote_types(x.dtype, torch.float32), x.numel()
    block = 4 * elements(torch.version.hip is not None)
    programs = 2 if interpreting() else max(1, min(PROGRAMS, triton.cdiv(n, block)))
    sums = torch.empty(programs, dtype=computed, device=x.device)
    out = torch.empty((), dtype=computed, device=x.device)
    with torch.cuda.device_of(x):
        on(sum_of_squares_kernel, x)[(programs,)](x.contiguous(), sums, n, programs, BLOCK=block, **CONFIG)
        on(sum_kernel, x)[(1,)](sums, out, programs, BLOCK=PROGRAMS, **CONFIG)
    return out


@triton.jit
def sum_of_squares_kernel(x, sums, n, programs, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), sums.dtype.element_ty)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < n:
        X = read(x, first + tl.arange(0, BLOCK), n)
        total += X * X
        first += programs.to(tl.int64) * BLOCK
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def sum_kernel(sums, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(sums + i, i < n, 0), 0))
