"""Block-sparse attention: layouts say which blocks of queries see which blocks of keys, and only those are computed."""
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..op import Op, Paths, of_kernel, one_by_one, op
from . import cpu, reference
from .layout import Blocks as Blocks
from .layout import Layout as Layout
from .layout import known
from .layout import stack as stack
from .patterns import bigbird as bigbird
from .patterns import bslongformer as bslongformer
from .patterns import dense as dense
from .patterns import fixed as fixed
from .patterns import sliding_window as sliding_window
from .patterns import variable as variable
from .show import show as show

kernel_attention, kernel_gradients = (of_kernel(__package__, name) for name in ("attention", "gradients"))


def under(q: Tensor, k: Tensor, layout: Sequence[Tensor], causal: bool) -> Layout:
    """The layout of the op's arguments."""
    found = known(layout, (q.shape[2], k.shape[2]))
    return found.causal() if causal else found


def on_cpu(q: Tensor, k: Tensor, v: Tensor, bias: Any, padding: Any, key: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    *layout, causal, scale, rate = rest
    return cpu.attention(q, k, v, under(q, k, layout, causal), bias, padding, key, scale, rate)


def on_gpu(q: Tensor, k: Tensor, v: Tensor, bias: Any, padding: Any, key: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    *layout, causal, scale, rate = rest
    seen = under(q, k, layout, causal)
    return kernel_attention(q, k, v, seen.rows, seen.masks, bias, padding, key, scale, rate)


def backward_on_cpu(grads: tuple, inputs: tuple, outputs: tuple) -> list[Tensor]:
    q, k, v, bias, padding, key, *layout, causal, scale, rate = inputs
    (grad,), (out, lse) = grads, outputs
    return cpu.gradients(grad, q, k, v, out, lse, under(q, k, layout, causal), bias, padding, key, scale, rate)


def backward_on_gpu(grads: tuple, inputs: tuple, outputs: tuple) -> list[Tensor]:
    q, k, v, bias, padding, key, *layout, causal, scale, rate = inputs
    (grad,), (out, lse), seen = grads, outputs, under(q, k, layout, causal)
    return kernel_gradients(
        grad, q, k, v, out, lse, seen.rows, seen.columns, seen.masks, bias, padding, key, scale, rate)


def folded(fn: Any, by_batch: int) -> Any:
    """A vmap rule: one batch of all, of the first arguments; one after another where others are batched, or draws go by row."""
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
        key = by_batch
        if args[key] is not None or any(d is not None for d in in_dims[by_batch:]):
            return one_by_one(fn())(info, in_dims, *args)
        n, first = info.batch_size, by_batch - 5                # q: what has gone before are gradients and results
        B = args[first].shape[0 if in_dims[first] is None else 1 if in_dims[first] == 0 else 0]

        def fold(x: Tensor | None, dim: int | None) -> Tensor | None:
            if x is None:
                return None
            x = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.expand(n, B, *x.shape[2:]).flatten(0, 1)

        out = fn()(*map(fold, args[:by_batch], in_dims), *args[by_batch:])
        outs = [x.unflatten(0, (n, B)) for x in out]
        bias, dim = args[by_batch - 2], in_dims[by_batch - 2]
        if first and bias is not None and bias.movedim(dim, 0).shape[1 if dim is not None else 0] == 1:
            outs[3] = outs[3].sum(1, keepdim=True)
        return tuple(outs), (0,) * len(outs)

    return vmap


attention: Op = op(
    "sparse_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? padding, Tensor? key, Tensor row_start, Tensor row_full, "
    "Tensor row_index, Tensor row_mask, Tensor column_start, Tensor column_full, Tensor column_index, Tensor column_mask, "
    "Tensor masks, bool causal, float scale, float rate) -> (Tensor, Tensor)",
    reference.attention, cuda=on_gpu, cpu=on_cpu, saves=1, vmap=folded(lambda: attention, 5),
    backward=Paths(backward_on_cpu, backward_on_gpu, folded(lambda: attention.backward, 8)))


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, causal: bool = False, bias: Tensor | None = None,
    key_padding: Tensor | None = None, scale: float | None = None, dropout: float = 0., key: Any = None,
) -> Tensor:
    """Attention over what a layout lets each query see.

        out = dropout(softmax(scale q k' + bias, over the keys that are seen)) v,    0 where none is

    Args:
        q: (batch, heads, Nq, D), in floating point; on a GPU D is at most 256.
        k, v: (batch, heads / group, Nk, D), in q's dtype: a group of query heads shares one of keys.
        layout: of lengths (Nq, Nk), for all heads or with one layout for each of q's.
        causal: whether a query sees nothing that comes later: query i sees keys up to i + Nk - Nq.
        bias: added to the scores; broadcasts to (batch, heads, Nq, Nk), and has a gradient.
        key_padding: bool (batch, Nk), False for keys that nobody sees.
        scale: D**-0.5 by default.
        dropout: at which rate weights are dropped, in [0, 1].
        key: for dropout: int32 (2,), or an `fspeed.random.Key` of the batch's rows, so that draws do not depend on how a batch is
            split; they are the bits of `fspeed.random.dropout` of the weights. Without a key nothing is dropped.

    Returns: (batch, heads, Nq, D), in q's dtype.
    Raises: ValueError, TypeError where shapes, dtypes or ranges do not fit one another.
    Cost: 4 D FLOPs for each pair of tokens in the layout's blocks, and 10 D in backward; no memory of that size: what goes in and
        comes out, and a chunk. Second derivatives and forward mode take the dense reference: N x N numbers.

    >>> layout = sliding_window(4 * 64, block=64)
    >>> q, k, v = torch.randn(3, 1, 2, 256, 32)
    >>> sparse_attention(q, k, v, layout, causal=True).shape
    torch.Size([1, 2, 256, 32])

    Source: R. Child et al., arXiv 1904.10509; M. Zaheer et al., arXiv 2007.14062; T. Dao, arXiv 2307.08691 (no scores held).
    """
    check(q, k, v, layout, key_padding, dropout)
    words = None if key is None or dropout == 0 else seed(key, q)
    tensors = layout.to(q.device).tensors()
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return attention(q, k, v, four(bias, q, k), key_padding, words, *tensors, causal, scale, float(dropout))[0]


def seed(key: Any, q: Tensor) -> Tensor:
    """A key's words, and the place of each row of the batch."""
    words = getattr(key, "data", key) if hasattr(key, "rows") else key
    rows = key.rows if hasattr(key, "rows") else torch.arange(len(q), device=q.device)
    if words.shape != (2,) or rows.shape != q.shape[:1]:
        raise ValueError(f"sparse_attention: a key {tuple(words.shape)} of {len(rows)} rows; expected (2,), and {len(q)} rows")
    return torch.cat([words.to(q.device), rows.to(q.device, torch.int32)])


def four(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A bias with all of its four dims."""
    if bias is None:
        return None
    whole = *q.shape[:3], k.shape[2]
    try:
        bias.expand(whole)
    except RuntimeError:
        raise ValueError(f"sparse_attention: a bias {tuple(bias.shape)} does not broadcast to {whole}") from None
    if not bias.is_floating_point():
        raise TypeError(f"sparse_attention: a bias of {bias.dtype}; expected floats, and True where keys are seen in key_padding")
    return bias[(None,) * (4 - bias.dim())]


def check(q: Tensor, k: Tensor, v: Tensor, layout: Layout, padding: Tensor | None, dropout: float) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.shape != v.shape or k.dim() != 4 or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"sparse_attention: {shapes}; expected (batch, heads, tokens, D), k's and v's alike")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"sparse_attention: {q.shape[1]} heads of queries, {k.shape[1]} of keys; expected a multiple")
    if not q.is_floating_point() or {k.dtype, v.dtype} != {q.dtype}:
        raise TypeError(f"sparse_attention: q of {q.dtype}, k of {k.dtype}, v of {v.dtype}; expected one floating dtype")
    if layout.lengths != (q.shape[2], k.shape[2]):
        raise ValueError(f"sparse_attention: a layout of {layout.lengths} tokens for {shapes}; make one of these lengths")
    if layout.heads not in (1, q.shape[1]):
        raise ValueError(f"sparse_attention: a layout of {layout.heads} heads for {shapes}; expected 1 or {q.shape[1]}")
    if padding is not None and (padding.shape != (k.shape[0], k.shape[2]) or padding.dtype != torch.bool):
        raise ValueError(f"sparse_attention: key_padding {tuple(padding.shape)} of {padding.dtype}; expected bool "
                         f"{(k.shape[0], k.shape[2])}")
    if not 0 <= dropout <= 1:
        raise ValueError(f"sparse_attention: dropout is {dropout}, and must be in [0, 1]")
