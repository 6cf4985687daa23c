"""Rows of logits in Triton: log-sum-exp, target and mean in one pass; the gradient in one pass; e in place in a second one.

A row may start anywhere. It is read from the last address before it that is a multiple of 16 elements, so its loads are 128 bits
wide whatever the vocabulary; only the first and the last block have masks.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interpret import on
from .reference import accumulator

BLOCK, WARPS = 4096, 8


def statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.statistics`."""
    rows, at = flat(logits), targets.reshape(-1).contiguous()
    lse, picked, mean = (torch.empty(targets.shape, dtype=accumulator(logits.dtype), device=logits.device) for _ in range(3))
    if len(rows):
        on(forward, rows)[(len(rows),)](rows, at, lse, picked, mean, rows.stride(0), rows.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return lse, picked, mean


def statistics_backward(grads: tuple, inputs: tuple, outputs: tuple) -> tuple[Tensor]:
    logits, targets = inputs
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    gradient(flat(logits), flat(out), targets, outputs[0], *grads)
    return (out,)


def exponentials_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of each row (n, V), which becomes its softmax, and ones."""
    nobody = torch.full((len(logits),), -1, device=logits.device)
    lse, zeros, _ = statistics(logits, nobody)
    ones = torch.ones_like(lse)
    gradient(logits, logits, nobody, lse, ones, zeros, zeros)
    return lse, ones


def gradient(rows: Tensor, out: Tensor, targets: Tensor, *numbers: Tensor) -> None:
    if len(rows):
        at, *each = (t.reshape(-1).contiguous() for t in (targets, *numbers))
        on(backward, rows)[(len(rows),)](
            rows, out, at, *each, rows.stride(0), out.stride(0), rows.shape[1], BLOCK=BLOCK, num_warps=WARPS)


def flat(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit
def forward(logits, targets, lse, picked, mean, stride, width, BLOCK: tl.constexpr):
    dtype: tl.constexpr = lse.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    start = row * stride
    base = start // 16 * 16
    head = (start - base).to(tl.int32)
    end = head + width
    i = tl.arange(0, BLOCK)
    x = tl.load(logits + base + i, (i >= head) & (i < end), float("-inf")).to(dtype)
    top = tl.max(x, 0)
    total = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
    added = tl.where((i >= head) & (i < end), x, 0.0)
    for at in range(BLOCK, end // BLOCK * BLOCK, BLOCK):
        x = tl.load(logits + base + at + i).to(dtype)
        top, total = online(x, top, total)
        added += x
    last = tl.maximum(end // BLOCK * BLOCK, BLOCK)
    x = tl.load(logits + base + last + i, last + i < end, float("-inf")).to(dtype)
    top, total = online(x, top, total)
    added += tl.where(last + i < end, x, 0.0)
    target = tl.load(targets + row)
    mine = (target >= 0) & (target < width)
    tl.store(lse + row, tl.log(tl.sum(total, 0)) + tl.where(top == float("-inf"), 0.0, top))
    tl.store(picked + row, tl.load(logits + start + target, mine, 0.0).to(dtype))
    tl.store(mean + row, tl.sum(added, 0) / width)


@triton.jit
def online(x, top, total):
    higher = tl.maximum(top, tl.max(x, 0))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, total * tl.exp(top - shift) + tl.exp(x - shift)


@triton.jit
def backward(logits, out, targets, lse, g_lse, g_picked, g_mean, stride, out_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start, to = row * stride, row * out_stride
    base = start // 16 * 16
    head = (start - base).to(tl.int32)
    end = head + width
    shift = tl.load(lse + row)
    a, b, c = tl.load(g_lse + row), tl.load(g_picked + row), tl.load(g_mean + row) / width
    target = tl.load(targets + row).to(tl.int32) + head
    if (target < head) | (target >= end):
        target = -1
    logits += base
    out += to - head
    piece(logits, out, 0, head, end, target, shift, a, b, c, True, BLOCK)
    for at in range(BLOCK, end // BLOCK * BLOCK, BLOCK):
        piece(logits, out, at, head, end, target, shift, a, b, c, False, BLOCK)
    last = tl.maximum(end // BLOCK * BLOCK, BLOCK)
    piece(logits, out, last, head, end, target, shift, a, b, c, True, BLOCK)


@triton.jit
def piece(logits, out, at, head, end, target, shift, a, b, c, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    i = at + tl.arange(0, BLOCK)
    if MASKED:
        inside = (i >= head) & (i < end)
        x = tl.load(logits + i, inside, 0.0).to(shift.dtype)
    else:
        x = tl.load(logits + i).to(shift.dtype)
    g = (a * tl.exp(x - shift) + tl.where(i == target, b, 0.0) + c).to(out.dtype.element_ty)
    if MASKED:
        tl.store(out + i, g, inside)
    else:
        tl.store(out + i, g)
