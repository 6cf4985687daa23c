"""Block-sparse attention on a GPU: the launches of the kernels in flash.py over work lists of a layout's rows and columns."""
from typing import Any

import torch
import triton
from torch import Tensor

from ..interpret import on
from . import flash
from .layout import Blocks
from .work import Work, work_list

# (block up to, head dimension up to) -> (OUTER, INNER, num_warps, num_stages)
FORWARD = {(64, 64): (64, 64, 4, 3), (64, 128): (64, 64, 4, 2), (64, 256): (64, 64, 8, 2), (128, 64): (128, 64, 4, 3),
           (128, 128): (128, 64, 8, 2), (128, 256): (64, 64, 8, 2)}
BACKWARD = {(64, 64): (64, 64, 4, 2), (64, 128): (64, 64, 8, 2), (64, 256): (64, 32, 8, 1), (128, 64): (64, 64, 4, 2),
            (128, 128): (64, 64, 8, 2), (128, 256): (64, 32, 8, 1)}
TILE = 16           # rows of a program of the kernels that only add up; it divides every block
CPU_WIDTH = 8       # pieces at a time that the interpreter's work lists are made for


def attention(
    q: Tensor, k: Tensor, v: Tensor, rows: Blocks, masks: Tensor, bias: Tensor | None = None, padding: Tensor | None = None,
    key: Tensor | None = None, scale: float = 1.0, rate: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out, lse): attention over the blocks of a layout's rows, and the logarithm of each row's sum, -inf where nothing is seen.

    q is (batch, heads, Nq, D); k, v are (batch, heads / group, Nk, D); bias broadcasts to (batch, heads, Nq, Nk); padding is
    bool (batch, Nk); with a key of int32 (2 + batch,), two words and
    each row's place in the whole batch, weights are dropped at this rate.
    """
    q, scale = (-q, -scale) if scale < 0 else (q, scale)
    q, k, v = map(dense_rows, (q, k, v))
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)
    block, D = masks.shape[-1], q.shape[-1]
    work, copies, shared = work_of(rows, q, block, q.shape[2])
    parts, part_lse = scratch(work, copies, block, D), scratch(work, copies, block)
    constants, options = configured(FORWARD, q, block, bias, padding, key, rate)
    grid = (len(work.pieces) * copies * block // constants["OUTER"],)
    on(flash.forward, q)[grid](
        q, k, v, out, lse, parts, part_lse, work.pieces, *inputs(rows, masks, q, k, bias, padding, key),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides(bias, q, k),
        *sizes(q, k, copies, shared), scale, 1 - rate, **constants, **options)
    merge(work, copies, shared, parts, part_lse, out, lse, block, True)
    return out, lse


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Blocks, columns: Blocks, masks: Tensor,
    bias: Tensor | None = None, padding: Tensor | None = None, key: Tensor | None = None, scale: float = 1.0, rate: float = 0.0,
) -> list[Tensor]:
    """The gradients of q, k, v, and of bias if there is one, whose sum over what it is broadcast along is in no fixed order."""
    q, k, v, grad = map(dense_rows, (q, k, v, grad))
    block, shared_inputs = masks.shape[-1], (masks, q, k, bias, padding, key)
    delta = torch.empty_like(lse)
    batch, heads, N, D = q.shape
    on(flash.rowsums, q)[(triton.cdiv(N, TILE), batch * heads)](
        grad, out.contiguous(), delta, *grad.stride()[:3], heads, N, HEAD=D, DIM=padded(D), TILE=TILE)
    constants, options = configured(BACKWARD, q, block, bias, padding, key, rate)
    at = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3], *strides(bias, q, k)]
    tiles = block // constants["OUTER"]

    dq = q.new_empty(q.shape)
    dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32, memory_format=torch.contiguous_format)
    work, copies, shared = work_of(rows, q, block, N)
    parts = scratch(work, copies, block, D)
    on(flash.backward_rows, q)[(len(work.pieces) * copies * tiles,)](
        q, k, v, grad, dq, lse if dbias is None else dbias, lse, delta, parts, work.pieces, *inputs(rows, *shared_inputs),
        *at, *strides(dbias, q, k), *sizes(q, k, copies, shared), scale, 1 - rate, **constants, **options)
    merge(work, copies, shared, parts, None, dq, None, block, False)

    dk, dv = (x.new_empty(batch, heads, *x.shape[2:]) for x in (k, v))
    work, copies, shared = work_of(columns, q, block, k.shape[2])
    part_dk, part_dv = (scratch(work, copies, block, D) for _ in range(2))
    on(flash.backward_columns, q)[(len(work.pieces) * copies * tiles,)](
        q, k, v, grad, dk, dv, lse, delta, part_dk, part_dv, work.pieces, *inputs(columns, *shared_inputs),
        *at, *sizes(q, k, copies, shared), scale, 1 - rate, **constants, **options)
    for part, of in ((part_dk, dk), (part_dv, dv)):
        merge(work, copies, shared, part, None, of, None, block, False)
    group = heads // k.shape[1]
    dk, dv = (x if group == 1 else x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return [dq, dk, dv] + ([] if bias is None or dbias is None else [dbias.to(bias.dtype)])


def merge(work: Work, copies: int, shared: int, parts: Tensor, part_lse: Tensor | None, out: Tensor, lse: Tensor | None,
          block: int, softmax: bool) -> None:
    if work.places:
        heads, N, D = out.shape[1:]
        on(flash.merge, out)[(len(work.splits) * copies * (block // TILE),)](
            parts, parts if part_lse is None else part_lse, out, parts if lse is None else lse, work.splits, copies, heads,
            shared, N, HEAD=D, DIM=padded(D), BLOCK=block, TILE=TILE, SOFTMAX=softmax)


def work_of(side: Blocks, q: Tensor, block: int, N: int) -> tuple[Work, int, int]:
    """The work list of a layout's rows or columns, kept with them; copies in a launch; heads that share the list."""
    shared = q.shape[1] // (len(side.full) // triton.cdiv(N, block))
    copies = q.shape[0] * shared
    lists: dict[tuple[int, int], Work] = side.__dict__.setdefault("_work", {})
    width = CPU_WIDTH if q.is_cpu else 2 * torch.cuda.get_device_properties(q.device).multi_processor_count
    if (copies, width) not in lists:
        made = work_list(side.start.cpu(), side.full.cpu(), copies, width)
        lists[copies, width] = Work(made.pieces.to(q.device), made.splits.to(q.device), made.places)
    return lists[copies, width], copies, shared


def configured(table: dict, q: Tensor, block: int, bias: Any, padding: Any, key: Any, rate: float) -> tuple[dict, dict]:
    """The kernels' constants, and how they are launched."""
    D = q.shape[-1]
    if D > 256:
        raise ValueError(f"a head dimension of {D}: the kernels take up to 256")
    dim = padded(D)
    outer, inner, warps, stages = table[64 if block <= 64 else 128, max(64, dim)]
    constants = dict(HEAD=D, DIM=dim, BLOCK=block, OUTER=min(outer, block), INNER=min(inner, block), PADDING=padding is not None,
                     BIAS=bias is not None, DROPOUT=key is not None and rate > 0, PRECISION="ieee")
    return constants, dict(num_warps=warps, num_stages=stages)


def inputs(side: Blocks, masks: Tensor, q: Tensor, k: Tensor, bias: Any, padding: Any, key: Any) -> list[Tensor]:
    """Index, mask, masks, padding, bias and key; what is not there is never read."""
    bytes_of = lambda x: side.mask if x is None else x.contiguous().view(torch.int8)
    return [side.index, side.mask, bytes_of(masks), bytes_of(padding), side.mask if bias is None else bias,
            side.mask if key is None else key]


def strides(bias: Tensor | None, q: Tensor, k: Tensor) -> tuple[int, ...]:
    return (0, 0, 0, 0) if bias is None else bias.expand(*q.shape[:3], k.shape[2]).stride()


def sizes(q: Tensor, k: Tensor, copies: int, shared: int) -> list[int]:
    return [copies, q.shape[1], shared, q.shape[1] // k.shape[1], q.shape[2], k.shape[2]]


def scratch(work: Work, copies: int, block: int, *width: int) -> Tensor:
    """float32: the results of parts of rows, a head's rows, or a number for each."""
    return torch.empty(work.places * copies, block, *width, dtype=torch.float32, device=work.pieces.device)


def padded(D: int) -> int:
    """The head dimension that tiles have: a power of two, 16 or more."""
    return max(16, triton.next_power_of_2(D))


def dense_rows(x: Tensor) -> Tensor:
    """With elements of a row side by side: what kernels load."""
    return x if x.stride(-1) == 1 else x.contiguous()
