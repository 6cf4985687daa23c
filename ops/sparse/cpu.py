"""Block-sparse attention on the CPU: matrix products of a chunk of rows and the keys they see, gathered, and again in backward.

    p = exp(scale q k' + bias - top),  out = p v / sum p;    ds = p (g v' - delta),  delta = sum g out

A chunk's scores stay in the cache, and nothing else is held but what goes in and comes out. A row that is long comes in several
pieces, merged by their log-sum-exp.
"""
import torch
from torch import Tensor

from .chunks import Chunk
from .layout import Layout
from .tiles import Tiles, take


def attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Tensor | None = None, padding: Tensor | None = None,
    key: Tensor | None = None, scale: float = 1.0, rate: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out, lse): as kernel.attention."""
    tiles = Tiles(layout, q, k, bias, padding, key, scale, rate)
    Q, K, V = tiles.lines(q), tiles.blocks(k), tiles.blocks(v)
    out = torch.zeros_like(Q)
    lse = out.new_full((len(Q), tiles.stack * tiles.block), -torch.inf, dtype=tiles.wide)
    tiny = torch.finfo(tiles.wide).tiny
    for chunk in tiles.chunks:
        room = tiles.room(chunk)
        take(Q, chunk.line, room.q_lines)
        take(K, chunk.flat, room.k_blocks)
        take(V, chunk.flat, room.v_blocks)
        room.q.mul_(scale)
        x, top, total = tiles.scores(chunk, room), room.top, room.total
        torch.amax(x, -1, keepdim=True, out=top)
        top.clamp_(min=-torch.finfo(tiles.wide).max)                # -inf - -inf is none
        torch.sum(x.sub_(top).exp_(), -1, keepdim=True, out=total)
        if key is not None:
            x.mul_(tiles.kept(chunk))
        torch.bmm(x, room.v, out=room.o).div_(total.clamp(min=tiny))
        top.add_(total.log_())
        put(out, lse, chunk, room.o_lines, top.view(len(top), -1))
    return tiles.unlined(out), tiles.unlined(lse).squeeze(-1)


def put(out: Tensor, lse: Tensor, chunk: Chunk, o: Tensor, top: Tensor) -> None:
    """Write pieces of lines, or merge them with those before."""
    if not chunk.first:
        before, rows = lse[chunk.line], (*top.shape, -1)
        both = torch.logaddexp(before, top)
        ref = both.masked_fill(both == -torch.inf, 0)
        o = o.view(rows) * (top - ref).exp()[..., None] + out[chunk.line].view(rows) * (before - ref).exp()[..., None]
        o, top = o.flatten(1), both
    out.index_copy_(0, chunk.line, o.to(out.dtype))
    lse.index_copy_(0, chunk.line, top)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Layout, bias: Tensor | None = None,
    padding: Tensor | None = None, key: Tensor | None = None, scale: float = 1.0, rate: float = 0.0,
) -> list[Tensor]:
    """The gradients of q, k, v, and of bias if there is one."""
    tiles = Tiles(layout, q, k, bias, padding, key, scale, rate)
    Q, G, K, V = tiles.lines(q), tiles.lines(grad), tiles.blocks(k), tiles.blocks(v)
    L = tiles.lines(lse.masked_fill(lse == -torch.inf, torch.inf)[..., None])
    delta = tiles.lines(dots(grad, out, tiles.wide)[..., None])
    dQ, dK, dV = (torch.zeros(x.shape, dtype=tiles.wide) for x in (Q, K, V))
    dbias = None if bias is None else torch.zeros(bias.shape, dtype=tiles.wide)
    for chunk in tiles.chunks:
        room = tiles.room(chunk)
        take(Q, chunk.line, room.q_lines)
        take(G, chunk.line, room.g_lines)
        take(K, chunk.flat, room.k_blocks)
        take(V, chunk.flat, room.v_blocks)
        room.q.mul_(scale)
        p = tiles.scores(chunk, room).sub_(L[chunk.line][..., None]).exp_()
        ds = torch.bmm(room.g, room.vT, out=room.ds)
        if key is None:
            ds.sub_(delta[chunk.line][..., None]).mul_(p)
        else:
            keep = tiles.kept(chunk)
            ds.mul_(keep).sub_(delta[chunk.line][..., None]).mul_(p)
            p.mul_(keep)
        torch.bmm(room.xT, room.g, out=room.dk)
        dV.index_add_(0, chunk.flat, room.dk_blocks)
        if dbias is not None:
            tiles.add_bias(dbias, chunk, ds)
        torch.bmm(room.dsT, room.q, out=room.dk)
        dK.index_add_(0, chunk.flat, room.dk_blocks)
        torch.bmm(ds, room.k, out=room.o)
        dQ.index_add_(0, chunk.line, room.o_lines)
    found = tiles.unlined(dQ.mul_(scale)).to(q.dtype), tiles.unblocked(dK).to(k.dtype), tiles.unblocked(dV).to(v.dtype)
    return [*found] if dbias is None or bias is None else [*found, dbias.to(bias.dtype)]


def dots(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """sum a b over the last dim, some rows at a time."""
    pairs = zip(a.flatten(0, 1).split(1), b.flatten(0, 1).split(1), strict=True)
    return torch.cat([(x.to(wide) * y).sum(-1) for x, y in pairs]).view(a.shape[:-1])
