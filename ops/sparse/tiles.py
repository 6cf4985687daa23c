"""The scores of a chunk of a layout on a CPU: what is read and added where, in memory that the next chunk takes over."""
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..threefry import threefry_uniform
from .chunks import Chunk, chunks
from .layout import Layout
from .reference import accumulator


class Room:
    """A chunk's tensors, as they are computed with and, flat, as they are read and added."""
    NAMES = ("q", "k", "v", "g", "x", "ds", "o", "dk")

    def __init__(
        self, pieces: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, x: Tensor, ds: Tensor, o: Tensor, dk: Tensor,
    ) -> None:
        self.q, self.k, self.v, self.g, self.x, self.ds, self.o, self.dk = q, k, v, g, x, ds, o, dk
        self.kT, self.vT, self.xT, self.dsT = k.mT, v.mT, x.mT, ds.mT
        self.q_lines, self.g_lines, self.o_lines = q.flatten(1), g.flatten(1), o.flatten(1)
        self.k_blocks, self.v_blocks, self.dk_blocks = (t.view(pieces, -1) for t in (k, v, dk))
        self.top, self.total = (x.new_empty(*x.shape[:2], 1) for _ in range(2))

    @staticmethod
    def shapes(n: int, rows: int, keys: int, D: int) -> dict[str, tuple[int, ...]]:
        side, other, both = (n, rows, D), (n, keys, D), (n, rows, keys)
        return dict(q=side, k=other, v=other, g=side, x=both, ds=both, o=side, dk=other)


class Tiles:
    """Attention over a layout in tiles: queries in lines of stacked heads' rows, (lines, stack * block * D), keys in blocks.

    A chunk's tiles are (n, stack * block, d * block).
    """

    def __init__(
        self, layout: Layout, q: Tensor, k: Tensor, bias: Tensor | None, padding: Tensor | None, key: Tensor | None, scale: float,
        rate: float,
    ) -> None:
        self.layout, self.block, (self.R, self.C) = layout, layout.block, layout.shape
        (self.batch, self.heads, self.Nq, self.D), (_, groups, self.Nk, _) = q.shape, k.shape
        self.stack = self.heads // groups if layout.heads == 1 else 1
        self.chunks = chunks(layout, self.batch, self.heads, groups)
        self.bias, self.key, self.scale, self.rate = bias, key, scale, rate
        self.padding = None if padding is None else pad(padding, (0, self.C * self.block - self.Nk)).unflatten(1, (self.C, -1))
        self.wide = accumulator(q.dtype)
        most = {chunk.index.shape: Room.shapes(len(chunk.line), self.stack * self.block, chunk.index.shape[1] * self.block, self.D)
                for chunk in self.chunks}.values()
        self.memory = {name: torch.empty(max(prod(shapes[name]) for shapes in most), dtype=self.wide)
                       for name in Room.NAMES if most}
        self.rooms: dict[tuple[int, int], Room] = {}

    def lines(self, x: Tensor) -> Tensor:
        """(batch, heads, Nq, D) in lines."""
        x = ended(x, self.R * self.block).unflatten(2, (self.R, self.block)).unflatten(1, (-1, self.stack))
        return x.transpose(2, 3).reshape(-1, self.stack * self.block * x.shape[-1])

    def unlined(self, x: Tensor) -> Tensor:
        """(batch, heads, Nq, D) of lines."""
        x = x.view(self.batch, -1, self.R, self.stack, self.block, x.shape[1] // (self.stack * self.block)).transpose(2, 3)
        return x.reshape(self.batch, self.heads, self.R * self.block, -1)[:, :, : self.Nq].contiguous()

    def blocks(self, x: Tensor) -> Tensor:
        """(batch, groups, Nk, D) in blocks, (blocks, block * D)."""
        return ended(x, self.C * self.block).reshape(-1, self.block * x.shape[-1])

    def unblocked(self, x: Tensor) -> Tensor:
        """(batch, groups, Nk, D) of blocks."""
        return x.view(self.batch, -1, self.C * self.block, self.D)[:, :, : self.Nk].contiguous()

    def room(self, chunk: Chunk) -> Room:
        """Memory for a chunk, which the next one takes over."""
        n, d = chunk.index.shape
        if (n, d) not in self.rooms:
            shapes = Room.shapes(n, self.stack * self.block, d * self.block, self.D)
            self.rooms[n, d] = Room(n * d, **{name: self.memory[name][: prod(shape)].view(shape) for name, shape in shapes.items()})
        return self.rooms[n, d]

    def scores(self, chunk: Chunk, room: Room) -> Tensor:
        """q k' + bias, -inf where nothing is seen."""
        x = torch.bmm(room.q, room.kT, out=room.x)
        if chunk.masks.shape[1] == 0 and self.bias is None and self.padding is None:
            return x
        tiles = x.view(len(x), self.stack, self.block, -1)
        if self.bias is not None:
            tiles.add_(self.bias[self.at(self.bias, chunk)])
        cut = chunk.masks.shape[1]
        if cut:
            hidden = ~self.layout.masks[chunk.masks].transpose(1, 2).flatten(2)
            tiles[..., -cut * self.block :].masked_fill_(hidden[:, None], -torch.inf)
        if self.padding is not None:
            batch, _, _, columns = self.places(chunk)
            tiles.masked_fill_(~self.padding[batch[:, :, 0], columns].flatten(1)[:, None, None], -torch.inf)
        return x

    def places(self, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of a chunk's tiles the batch (n, 1, 1), head (n, stack, 1), query (n, 1, block), and block of keys (n, d)."""
        z = (chunk.line // self.R * self.stack)[:, None] + torch.arange(self.stack)
        rows = (chunk.line % self.R * self.block)[:, None] + torch.arange(self.block)
        return z[:, :1, None] // self.heads, z[..., None] % self.heads, rows[:, None], chunk.index % self.C

    def at(self, bias: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """Where a chunk's tiles are in a bias that broadcasts to (batch, heads, Nq, Nk); where it does, at 0."""
        batch, head, row, columns = self.places(chunk)
        keys = (columns[..., None] * self.block + torch.arange(self.block)).flatten(1)[:, None, None]
        index = batch[..., None], head[..., None], row[..., None], keys
        return tuple(i.clamp(max=n - 1) if n > 1 else i.new_zeros(1, 1, 1, 1) for i, n in zip(index, bias.shape, strict=True))

    def kept(self, chunk: Chunk) -> Tensor:
        """Dropout's factors: a draw at the flat position in (whole batch, heads, Nq, Nk)."""
        assert self.key is not None
        batch, head, row, columns = self.places(chunk)
        batch = self.key[2:].long()[batch]
        rows = ((batch * self.heads + head) * self.Nq + row) * self.Nk
        draws = threefry_uniform(self.key[:2], rows[..., None] + columns[:, None, None] * self.block, self.block)
        return (draws < 1 - self.rate).to(self.wide).div_(1 - self.rate or 1.).view(len(chunk.line), self.stack * self.block, -1)

    def add_bias(self, to: Tensor, chunk: Chunk, ds: Tensor) -> None:
        """ds, to where its bias is."""
        at = self.at(to, chunk)
        tiles = ds.view(len(ds), self.stack, self.block, -1)
        to.index_put_(at, tiles.sum_to_size(torch.broadcast_shapes(*(i.shape for i in at))), accumulate=True)


def ended(x: Tensor, n: int) -> Tensor:
    """x with rows of zeros at its end, so that there are n."""
    return x if x.shape[2] == n else pad(x, (0, 0, 0, n - x.shape[2]))


def take(x: Tensor, at: Tensor, out: Tensor) -> None:
    """Rows of x, as numbers of out's dtype."""
    if x.dtype == out.dtype:
        torch.index_select(x, 0, at, out=out)
    else:
        out.copy_(x.index_select(0, at))
