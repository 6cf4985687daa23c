"""Trees and leaves of all kinds, to be drawn: what anything that takes a pytree should take."""
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

SHAPES = [(), (0,), (0, 8), (1,), (17,), (3, 5), (2, 1, 3)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
DTYPES = [*FLOATS, torch.int32, torch.int64, torch.uint8, torch.bool]


class Pair(NamedTuple):
    a: Any
    b: Any


def tensors(dtypes: Sequence[torch.dtype] = DTYPES) -> st.SearchStrategy[Tensor]:
    """A strategy for tensors of any bits, NaNs too: 0-d, empty, of odd sizes, transposed and strided.

    >>> from hypothesis import find
    >>> find(tensors([torch.int32]), lambda x: True).dtype
    torch.int32
    """
    return st.builds(tensor, st.sampled_from(dtypes), st.sampled_from(SHAPES), st.integers(0, 9), st.booleans())


def tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int, strided: bool) -> Tensor:
    x = torch.randint(0, 256, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    x = (x % 2).bool()[..., 0] if dtype == torch.bool else x.view(dtype).reshape(shape)
    return x.t() if strided and x.dim() == 2 else x[..., ::2] if strided and x.dim() else x


def trees(leaves: st.SearchStrategy) -> st.SearchStrategy:
    """A strategy for trees of at most 8 leaves: dicts, lists, tuples, named tuples, in each other and empty too.

    >>> from hypothesis import find
    >>> isinstance(find(trees(st.integers()), lambda t: True), (int, dict, list, tuple))
    True
    """
    keys = st.sampled_from(["a", "a/b", "b", "", "é"])
    return st.recursive(leaves, lambda t: st.one_of(
        st.lists(t, max_size=3), st.lists(t, max_size=3).map(tuple), st.dictionaries(keys, t, max_size=3), st.builds(Pair, t, t)
    ), max_leaves=8)
