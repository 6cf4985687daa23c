"""Stacks of transforms by name, to be drawn and applied in any order."""
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st

from fspeed.shard.mesh import Mesh
from fspeed.step import Step
from fspeed.transforms.accumulate import accumulate
from fspeed.transforms.checkpoint import checkpoint
from fspeed.transforms.data_parallel import data_parallel
from fspeed.transforms.donate import donate
from fspeed.transforms.jit import jit
from fspeed.transforms.mixed_precision import LossScaling, mixed_precision
from fspeed.transforms.skip_nonfinite import skip_nonfinite
from fspeed.transforms.zero_shard import zero_shard

Transform = Callable[[Step, Mesh], Step]

PLACEMENTS: dict[str, Transform] = {
    "data_parallel": lambda s, m: data_parallel(s, m),
    "zero1": lambda s, m: zero_shard(s, m, stage=1),
    "zero2": lambda s, m: zero_shard(s, m, stage=2),
    "zero3": lambda s, m: zero_shard(s, m, stage=3),
    "zero3 persist": lambda s, m: zero_shard(s, m, stage=3, persist=60),
}
"""Transforms over the data axis: a stack has one of them, or none on one rank."""

EXACT: dict[str, Transform] = {
    "accumulate": lambda s, m: accumulate(s, 3),
    "checkpoint": lambda s, m: checkpoint(s),
    "checkpoint some": lambda s, m: checkpoint(s, where=lambda at: at.index % 2 == 0),
    "checkpoint save": lambda s, m: checkpoint(s, save=lambda op: op is torch.ops.aten.tanh.default),
    "skip_nonfinite": lambda s, m: skip_nonfinite(s),
    "donate": lambda s, m: donate(s),
}
"""Transforms that change no number but by the order of sums."""

PRECISIONS: dict[str, Transform] = {
    "bf16": lambda s, m: mixed_precision(s, torch.bfloat16),
    "fp16": lambda s, m: mixed_precision(s, torch.float16, loss_scaling=LossScaling(initial=2.0**10, window=2)),
}
"""Transforms that compute in a short dtype: a stack with one equals the bare step with it."""

COMPILED: dict[str, Transform] = {"jit": lambda s, m: jit(s, backend="eager", limit=99)}
"""Transforms that take a while; a stack has one where it is asked for: `always=["jit"]`."""

TRANSFORMS = {**PLACEMENTS, **EXACT, **PRECISIONS, **COMPILED}


def stacked(step: Step, names: Sequence[str], mesh: Mesh, more: dict[str, Transform] | None = None) -> Step:
    """The step under the named transforms, the first innermost."""
    for name in names:
        step = {**TRANSFORMS, **(more or {})}[name](step, mesh)
    return step


def stacks(ranks: int, most: int = 4, always: Sequence[str] = ()) -> st.SearchStrategy[tuple[str, ...]]:
    """A strategy for stacks in any order: a placement (perhaps none on one rank), at most one precision, and others.

    Args:
        ranks: how many ranks the stack is for.
        most: how many transforms beside the placement.
        always: names that every stack has.

    >>> from hypothesis import find
    >>> find(stacks(2), lambda stack: len(stack) == 3 and stack[0] == "bf16")
    ('bf16', 'data_parallel', 'accumulate')
    """
    placement = st.sampled_from([*PLACEMENTS, None] if ranks == 1 else [*PLACEMENTS])
    precision = st.sampled_from([None, None, *PRECISIONS])
    others = st.lists(st.sampled_from([*EXACT]), unique=True, max_size=most)
    chosen = st.tuples(placement, precision, others).map(lambda c: [n for n in (c[0], c[1], *c[2], *always) if n is not None])
    return chosen.flatmap(st.permutations).map(tuple)


def splits(rows: int, parts: int) -> st.SearchStrategy[tuple[int, ...]]:
    """A strategy for divisions of rows over parts, however uneven: a part may have none.

    >>> from hypothesis import find
    >>> find(splits(5, 3), lambda split: split[0] == 2)
    (2, 0, 3)
    """
    cuts = st.lists(st.integers(0, rows), min_size=parts - 1, max_size=parts - 1).map(sorted)
    return cuts.map(lambda at: tuple(b - a for a, b in zip((0, *at), (*at, rows), strict=True)))
