"""Block-sparse attention on the CPU: matrix products of a chunk of rows and the keys they see, gathered, and again in backward.

    p = exp(scale q k' + bias - top),  out = p v / sum p;    ds = p (g v' - delta),  delta = sum g out

A chunk's scores stay in the cache, and nothing else is held but what goes in and comes out. A row that is long comes in several
pieces, merged by their log-sum-exp.
"""
import torch
from torch import Tensor

from .chunks import Chunk
from .layout import Layout
from .tiles import Tiles


def attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Tensor | None = None, padding: Tensor | None = None,
    key: Tensor | None = None, scale: float = 1.0, rate: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out, lse): as kernel.attention."""
    tiles = Tiles(layout, q, k, bias, padding, key, scale, rate)
    Q, K, V = tiles.lines(q), tiles.blocks(k), tiles.blocks(v)
    out = torch.zeros_like(Q, memory_format=torch.contiguous_format)
    lse = out.new_full((*Q.shape[:2], 1), -torch.inf, dtype=tiles.wide)
    for chunk in tiles.chunks:
        x = tiles.scores(chunk, tiles.take("q", Q, chunk.line), tiles.take("k", K, chunk.index))
        top = x.amax(-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0)
        total = x.sub_(top).exp_().sum(-1, keepdim=True)
        p = x if key is None else x.mul_(tiles.kept(chunk))
        o = tiles.product("o", p, tiles.take("k", V, chunk.index)).div_(total.clamp(min=torch.finfo(tiles.wide).tiny))
        put(out, lse, chunk, o, total.log_().add_(top))
    return tiles.unlined(out), tiles.unlined(lse).squeeze(-1)


def put(out: Tensor, lse: Tensor, chunk: Chunk, o: Tensor, top: Tensor) -> None:
    """Write pieces of lines, or merge them with those before."""
    if not chunk.first:
        before = lse[chunk.line]
        both = torch.logaddexp(before, top)
        ref = both.masked_fill(both == -torch.inf, 0)
        o = o.mul_((top - ref).exp()).add_(out[chunk.line] * (before - ref).exp())
        top = both
    out[chunk.line] = o.to(out.dtype)
    lse[chunk.line] = top


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Layout, bias: Tensor | None = None,
    padding: Tensor | None = None, key: Tensor | None = None, scale: float = 1.0, rate: float = 0.0,
) -> list[Tensor]:
    """The gradients of q, k, v, and of bias if there is one."""
    tiles = Tiles(layout, q, k, bias, padding, key, scale, rate)
    Q, G, K, V = tiles.lines(q), tiles.lines(grad), tiles.blocks(k), tiles.blocks(v)
    L = tiles.lines(lse.masked_fill(lse == -torch.inf, torch.inf)[..., None])
    delta = (G.to(tiles.wide) * tiles.lines(out)).sum(-1, keepdim=True)
    dQ, dK, dV = (torch.zeros(x.shape, dtype=tiles.wide) for x in (Q, K, V))
    dbias = None if bias is None else torch.zeros(bias.shape, dtype=tiles.wide)
    for chunk in tiles.chunks:
        q_, g_ = tiles.take("q", Q, chunk.line), tiles.take("g", G, chunk.line)
        k_, v_ = tiles.take("k", K, chunk.index), tiles.take("v", V, chunk.index)
        p = tiles.scores(chunk, q_, k_).sub_(L[chunk.line]).exp_()
        ds = tiles.product("ds", g_, v_.mT)
        if key is None:
            tiles.add(dV, chunk, p, g_)
        else:
            keep = tiles.kept(chunk)
            tiles.add(dV, chunk, p * keep, g_)
            ds.mul_(keep)
        ds.sub_(delta[chunk.line]).mul_(p)
        if dbias is not None:
            tiles.add_bias(dbias, chunk, ds)
        tiles.add(dK, chunk, ds, q_)
        dQ.index_add_(0, chunk.line, tiles.product("dq", ds, k_))
    found = tiles.unlined(dQ.mul_(scale)).to(q.dtype), tiles.unblocked(dK.mul_(scale)).to(k.dtype), tiles.unblocked(dV).to(v.dtype)
    return [*found] if dbias is None or bias is None else [*found, dbias.to(bias.dtype)]
