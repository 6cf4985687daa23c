"""A layout as text."""
from .layout import Layout


def show(layout: Layout, head: int = 0, width: int = 64) -> str:
    """A head of a layout as text: a character for a block, █ if it is seen whole, ▒ if in part, · if not at all.

    Of a layout of more than `width` blocks a side a character stands for several: ▒ if some are seen.

    >>> from fspeed.ops.sparse import bigbird
    >>> print(show(bigbird(6 * 16 - 1, 16, random=0, causal=True)))
    ▒·····
    █▒····
    ██▒···
    █·█▒··
    █··█▒·
    ▒···▒▒
    """
    R, C = layout.shape
    side = -(-max(R, C) // width)
    grid = [[0.0] * -(-C // side) for _ in range(-(-R // side))]
    for row, column, kind in zip(*(x.tolist() for x in layout.entries()), strict=True):
        if row // R == head:
            r, c = row % R // side, column // side
            grid[r][c] += (1 if kind < 0 else 0.5) / ((min(R, (r + 1) * side) - r * side) * (min(C, (c + 1) * side) - c * side))
    return "\n".join("".join("█" if seen > 1 - 1e-9 else "▒" if seen else "·" for seen in line) for line in grid)
