"""layer_norm on the CPU by PyTorch's own two functions; of rms_norm it has none, so that is made in blocks that stay in the cache."""
from typing import Any

import torch
from torch import Tensor

from ..rowwise import accumulator

BLOCK = 1 << 16        # numbers a block


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = accumulator(x)
    return torch.native_layer_norm(x.contiguous(), x.shape[-1:], weight.to(wide), None if bias is None else bias.to(wide), eps)


def layer_norm_backward(grads: Any, inputs: Any, outputs: Any) -> list[Tensor]:
    x, weight, bias, _ = inputs
    _, mean, rstd = outputs
    wide = accumulator(x)
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        grads[0].contiguous(), x.contiguous(), x.shape[-1:], mean, rstd, weight.to(wide), None if bias is None else bias.to(wide),
        [True, True, bias is not None])
    return [dx, dw.to(weight.dtype)] + ([] if bias is None else [db.to(bias.dtype)])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    n, wide = x.shape[-1], accumulator(x)
    y = torch.empty(x.shape, dtype=x.dtype)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=wide)
    weight = weight.to(wide)
    for h, y_, r in blocks(n, x, y, rstd):
        h = h.to(wide)
        torch.linalg.vector_norm(h, dim=-1, keepdim=True, out=r)
        r.square_().div_(n).add_(eps).rsqrt_()
        if y_.dtype == wide:
            torch.mul(h, r, out=y_).mul_(weight)
        else:
            y_.copy_((h * r).mul_(weight))
    return y, rstd


def rms_norm_backward(grads: Any, inputs: Any, outputs: Any) -> list[Tensor]:
    return list(backward(grads[0], None, inputs[0], inputs[1], outputs[1]))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.add(x, residual).contiguous()
    y, rstd = rms_norm(total, weight, eps)
    return y, total, rstd


def add_rms_norm_backward(grads: Any, inputs: Any, outputs: Any) -> list[Tensor]:
    dx, dw = backward(grads[0], grads[1], outputs[1], inputs[2], outputs[2])
    return [dx, dx.clone(), dw]


def backward(dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx = (g - <g, h> h) / rms + dtotal, of g = dy weight and h = x / rms; dweight = sum dy h."""
    n, wide = x.shape[-1], rstd.dtype
    dx, dw, weight_ = torch.empty(x.shape, dtype=x.dtype), torch.zeros(n, dtype=wide), weight.to(wide)
    for g, h, r, out, *more in blocks(n, dy, x, rstd, dx, *([] if dtotal is None else [dtotal])):
        g, h = g.to(wide), h.to(wide) * r
        gh = g * h
        dw += gh.sum(0)
        along = torch.mv(gh, weight_).div_(n)[:, None]
        h.mul_(along).neg_().addcmul_(g, weight_).mul_(r)
        torch.add(h, more[0], out=out) if more and out.dtype == wide else out.copy_(h + more[0] if more else h)
    return dx, dw.to(weight.dtype)


def blocks(n: int, *xs: Tensor) -> Any:
    """The same rows of each, so many as make up BLOCK numbers."""
    flat = [x.contiguous().view(-1, x.shape[-1]) for x in xs] if xs[0].numel() else []
    return zip(*[x.split(max(1, BLOCK // n)) for x in flat], strict=True)
