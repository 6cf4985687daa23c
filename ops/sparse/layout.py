"""Layouts: which blocks of queries see which blocks of keys, as compressed sparse rows, and columns for the gradients of keys.

A block that is seen whole is full; any other has a mask, and blocks that are cut alike share one. The ends of ragged sequences and
the diagonal of a causal layout are such masks, so that nothing else needs to know of bounds.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Predicate = Callable[[Tensor, Tensor], Tensor]
AT_ONCE = 1 << 22           # elements of a predicate evaluated at a time
FULL, EMPTY = -1, -2        # kinds of blocks that have no mask


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks by row or by column: those of row r are at `start[r]` to `start[r + 1]` of `index` and `mask`, full ones first."""
    start: Tensor           # int32 (heads * rows + 1,)
    full: Tensor            # int32 (heads * rows,): how many of a row's blocks are full
    index: Tensor           # int32 (nnz,): the other side's block number
    mask: Tensor            # int32 (nnz,): which of the layout's masks, -1 for a full block


@dataclass(frozen=True, eq=False)
class Layout:
    """Which keys each query sees, in blocks: tensors, built on the CPU in time and memory of its blocks.

    Args:
        rows: blocks by blocks of queries; row h * R + r is block r of layout head h.
        columns: the same blocks by blocks of keys, for their gradients.
        masks: bool (P, block, block), [query in block, key in block], no two alike.
        block: tokens a side, a power of two from 16.
        heads: 1, shared by all heads, or one a query head.
        lengths: (queries, keys) in tokens.

    >>> layout = Layout.of(torch.eye(3, dtype=torch.bool), block=16, lengths=(40, 40))
    >>> layout.rows.index, layout.rows.mask, len(layout.masks)
    (tensor([0, 1, 2], dtype=torch.int32), tensor([-1, -1,  0], dtype=torch.int32), 1)
    """
    rows: Blocks
    columns: Blocks
    masks: Tensor
    block: int
    heads: int
    lengths: tuple[int, int]

    @staticmethod
    def of(mask: Tensor, block: int = 64, lengths: tuple[int, int] | None = None) -> Layout:
        """The layout of a boolean mask of blocks, (R, C) or (heads, R, C); `lengths` in tokens, whole blocks if None."""
        check_mask(mask)
        mask = mask if mask.dim() == 3 else mask[None]
        heads, R, C = mask.shape
        lengths = lengths or (R * block, C * block)
        if blocks(lengths[0], block) != R or blocks(lengths[1], block) != C:
            raise ValueError(
                f"a mask of {R} x {C} blocks of {block} does not cover {lengths[0]} x {lengths[1]} tokens: "
                f"pass one of {blocks(lengths[0], block)} x {blocks(lengths[1], block)}")
        head, row, column = mask.cpu().nonzero(as_tuple=True)
        return Layout.at(row, column, lengths, block, head, heads)

    @staticmethod
    def of_elements(mask: Tensor, block: int = 64) -> Layout:
        """The layout of a boolean mask of tokens, (Nq, Nk) or (heads, Nq, Nk)."""
        check_mask(mask)
        mask = (mask if mask.dim() == 3 else mask[None]).cpu()
        lengths = (mask.shape[1], mask.shape[2])
        return stack([Layout.where(lambda i, j, m=m: m[i, j], lengths, block) for m in mask])   # type: ignore[misc]

    @staticmethod
    def where(predicate: Predicate, lengths: tuple[int, int], block: int = 64) -> Layout:
        """The layout of a predicate (i, j) -> bool on int64 tensors of query and key positions that broadcast.

        It is evaluated everywhere; `layout.cut(predicate)` does so only within a layout's blocks.
        """
        R, C = blocks(lengths[0], block), blocks(lengths[1], block)
        every = torch.cartesian_prod(torch.arange(R), torch.arange(C)).reshape(-1, 2)
        return Layout.at(every[:, 0], every[:, 1], lengths, block).cut(predicate)

    @staticmethod
    def at(
        row: Tensor, column: Tensor, lengths: tuple[int, int], block: int = 64, head: Tensor | None = None, heads: int = 1,
    ) -> Layout:
        """The layout with blocks at these int64 coordinates, in any order, some twice."""
        if block < 16 or block & block - 1:
            raise ValueError(f"a block of {block} tokens: want a power of two, 16 or more")
        if min(lengths) < 1 or heads < 1:
            raise ValueError(f"{heads} heads of {lengths[0]} x {lengths[1]} tokens: want at least one of each")
        R, C = blocks(lengths[0], block), blocks(lengths[1], block)
        inside = lambda x, n: not x.numel() or 0 <= int(x.min()) <= int(x.max()) < n
        head = torch.zeros_like(row) if head is None else head
        if not (inside(row, R) and inside(column, C) and inside(head, heads)):
            raise ValueError(f"blocks outside of {heads} heads of {R} x {C} blocks")
        flat = torch.unique((head * R + row) * C + column)
        row, column = flat // C, flat % C
        layout = make(row, column, torch.full_like(row, FULL), torch.ones(0, block, block, dtype=torch.bool), block, heads, lengths)
        ragged = (row % R == R - 1) & (lengths[0] % block > 0) | (column == C - 1) & (lengths[1] % block > 0)
        return layout.cut(everywhere, ragged) if bool(ragged.any()) else layout

    def cut(self, predicate: Predicate, test: Tensor | None = None) -> Layout:
        """What of this layout a predicate (i, j) -> bool holds for; `test` says for which entries it must be asked."""
        row, column, kind = self.entries()
        R = self.shape[0]
        table: dict[bytes, int] = {}
        intern(self.masks.cpu(), table)
        asked = torch.arange(len(row)) if test is None else test.nonzero()[:, 0]
        span, kind = torch.arange(self.block), kind.clone()
        for some in asked.split(max(1, AT_ONCE // self.block**2)):
            i, j = (row[some] % R * self.block)[:, None, None] + span[:, None], (column[some] * self.block)[:, None, None] + span
            seen = predicate(i.clamp(max=self.lengths[0] - 1), j.clamp(max=self.lengths[1] - 1))
            if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
                raise TypeError(f"a predicate gave {seen if not isinstance(seen, Tensor) else seen.dtype}: want a tensor of bool")
            seen = seen & (i < self.lengths[0]) & (j < self.lengths[1]) & self.elements(kind[some])
            kind[some] = intern(seen, table)
        return make(row, column, kind, masks_of(table, self.block), self.block, self.heads, self.lengths).to(self.device)

    def causal(self) -> Layout:
        """What of this layout lies not in the future: query i sees keys up to i + Nk - Nq, aligned at the ends."""
        return self._causal

    @cached_property
    def _causal(self) -> Layout:
        row, column, _ = self.entries()
        first, last = row % self.shape[0] * self.block + self.lengths[1] - self.lengths[0], column * self.block + self.block - 1
        cuts = lambda i, j: j <= i + self.lengths[1] - self.lengths[0]
        causal = self.cut(cuts, last > first)
        causal.__dict__["_causal"] = causal
        return causal

    def to(self, device: torch.device | str) -> Layout:
        """The layout on a device."""
        if torch.device(device) == self.device:
            return self
        moved = lambda side: Blocks(*[getattr(side, name).to(device) for name in FIELDS])
        return Layout(moved(self.rows), moved(self.columns), self.masks.to(device), self.block, self.heads, self.lengths)

    def dense(self) -> Tensor:
        """bool (heads, Nq, Nk): which keys each query sees."""
        return visible(self.rows.start, self.rows.index, self.rows.mask, self.masks, self.heads, self.lengths)

    def tensors(self) -> tuple[Tensor, ...]:
        """What `known` takes: rows, columns and masks."""
        return (*[getattr(side, name) for side in (self.rows, self.columns) for name in FIELDS], self.masks)

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each block, in the order of `rows`: its row (of any head), its column and its mask, int64 on the CPU."""
        rows = self.rows
        counts = rows.start.cpu().long().diff()
        return torch.arange(len(counts)).repeat_interleave(counts), rows.index.cpu().long(), rows.mask.cpu().long()

    def elements(self, kind: Tensor) -> Tensor:
        """bool (..., block, block): what is seen of blocks of such kinds."""
        return torch.cat([self.masks.cpu(), torch.ones(1, self.block, self.block, dtype=torch.bool)])[kind]

    @property
    def shape(self) -> tuple[int, int]:
        """Blocks of queries, and of keys."""
        return blocks(self.lengths[0], self.block), blocks(self.lengths[1], self.block)

    @property
    def device(self) -> torch.device:
        return self.masks.device

    @property
    def density(self) -> float:
        """Blocks over all blocks."""
        return len(self.rows.index) / (self.heads * self.shape[0] * self.shape[1])


FIELDS = ("start", "full", "index", "mask")


def known(tensors: Sequence[Tensor], lengths: tuple[int, int]) -> Layout:
    """The layout of `Layout.tensors`, the same object as long as these tensors live: what is made of it is kept with it."""
    state = [(id(x), x.data_ptr(), x._version) for x in tensors], lengths
    before, layout = _KNOWN.get(tensors[0], (None, None))
    if before == state:
        return layout
    *sides, masks = [x.detach() for x in tensors]           # the layout must not keep the key of its own entry alive
    block, rows = masks.shape[-1], blocks(lengths[0], masks.shape[-1])
    layout = Layout(Blocks(*sides[:4]), Blocks(*sides[4:]), masks, block, len(sides[1]) // rows, lengths)
    _KNOWN[tensors[0]] = state, layout
    return layout


_KNOWN: Any = WeakTensorKeyDictionary()


def stack(layouts: Sequence[Layout]) -> Layout:
    """One layout a head, from layouts of the same lengths and block.

    >>> one = Layout.of(torch.eye(2, dtype=torch.bool))
    >>> stack([one, one]).heads
    2
    """
    first = layouts[0]
    if len(layouts) == 1:
        return first
    for other in layouts:
        if (other.block, other.lengths) != (first.block, first.lengths):
            raise ValueError(f"layouts of {first.lengths} and {other.lengths} tokens in blocks of {first.block} and {other.block}: "
                             "heads must have the same lengths and block")
    rows, columns, kinds, masks, heads, P = [], [], [], [], 0, 0
    for layout in layouts:
        row, column, kind = layout.entries()
        rows.append(row + heads * layout.shape[0])
        columns.append(column)
        kinds.append(torch.where(kind < 0, kind, kind + P))
        masks.append(layout.masks.cpu())
        heads, P = heads + layout.heads, P + len(layout.masks)
    table: dict[bytes, int] = {}
    same = torch.cat([intern(torch.cat(masks), table), torch.tensor([FULL])])
    entries = torch.cat(rows), torch.cat(columns), same[torch.cat(kinds)]
    return make(*entries, masks_of(table, first.block), first.block, heads, first.lengths).to(first.device)


def make(row: Tensor, column: Tensor, kind: Tensor, masks: Tensor, block: int, heads: int, lengths: tuple[int, int]) -> Layout:
    """The layout of entries, without those that are EMPTY and masks that nobody has."""
    R, C = blocks(lengths[0], block), blocks(lengths[1], block)
    row, column, kind = row[kind != EMPTY], column[kind != EMPTY], kind[kind != EMPTY]
    used, at = torch.unique(kind.clamp(min=0)[kind >= 0], return_inverse=True)
    kind = kind.clone()
    kind[kind >= 0] = at
    head, row = row // R, row % R
    by_rows = compressed(head * R + row, column, kind, heads * R, C)
    return Layout(by_rows, compressed(head * C + column, row, kind, heads * C, R), masks[used], block, heads, lengths)


def compressed(row: Tensor, index: Tensor, kind: Tensor, rows: int, width: int) -> Blocks:
    order = torch.argsort((row * 2 + (kind >= 0)) * width + index)
    start = torch.zeros(rows + 1, dtype=torch.int32)
    start[1:] = torch.bincount(row, minlength=rows).cumsum(0)
    full = torch.bincount(row[kind == FULL], minlength=rows)
    return Blocks(start, full.int(), index[order].int(), kind[order].int())


def visible(start: Tensor, index: Tensor, mask: Tensor, masks: Tensor, heads: int, lengths: tuple[int, int]) -> Tensor:
    """bool (heads, Nq, Nk), of a layout's rows. The shapes of all steps are known without the numbers."""
    block = masks.shape[-1]
    R, C = blocks(lengths[0], block), blocks(lengths[1], block)
    row = torch.searchsorted(start.long(), torch.arange(len(index), device=start.device), right=True) - 1
    kinds = torch.cat([masks, masks.new_ones(1, block, block)])[mask.long()]
    grid = masks.new_zeros(heads * R, C, block, block).index_put((row, index.long()), kinds)
    whole = grid.reshape(heads, R, C, block, block).transpose(2, 3).reshape(heads, R * block, C * block)
    return whole[:, : lengths[0], : lengths[1]]


def intern(seen: Tensor, table: dict[bytes, int]) -> Tensor:
    """The kind of each of (n, block, block) masks; those new to the table are added."""
    whole, some = seen.flatten(1).all(1), seen.flatten(1).any(1)
    kind = torch.where(whole, FULL, torch.full(whole.shape, EMPTY))
    partial = (some & ~whole).nonzero()[:, 0]
    if len(partial):
        kind[partial] = torch.tensor([table.setdefault(mask.tobytes(), len(table)) for mask in seen[partial].numpy()])
    return kind


def masks_of(table: dict[bytes, int], block: int) -> Tensor:
    if not table:
        return torch.ones(0, block, block, dtype=torch.bool)
    return torch.frombuffer(bytearray(b"".join(table)), dtype=torch.bool).reshape(-1, block, block)


def everywhere(i: Tensor, j: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.bool)


def blocks(tokens: int, block: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-tokens // block)


def check_mask(mask: Tensor) -> None:
    if mask.dtype != torch.bool or mask.dim() not in (2, 3):
        raise ValueError(
            f"a mask of {mask.dtype} and shape {tuple(mask.shape)}: want bool, (rows, columns) or (heads, rows, columns)")
