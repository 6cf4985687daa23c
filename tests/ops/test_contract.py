"""Every op in one table: each `rows_*.py` beside it names ops with how to make their arguments, and all are held to one contract.

    ROWS = {"name": (op, lambda shape: arguments)}
"""
import importlib
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fspeed.testing.ops import check_op

pytest.importorskip("triton")

SIZES = [(1,), (17,), (63,), (130,), (1025,), (9, 7, 41)]
FILES = sorted(file.stem for file in Path(__file__).parent.glob("rows_*.py"))
ROWS = {f"{file[5:]}: {name}": row for file in FILES for name, row in importlib.import_module(f"tests.ops.{file}").ROWS.items()}


def strided(x: Tensor) -> Tensor:
    """The same numbers, the first dim innermost, every second place left out."""
    places = torch.full((*reversed(x.shape), 2), 7, dtype=x.dtype)[..., 0].permute(*reversed(range(x.dim())))
    return places.copy_(x)


HOW = {
    "bfloat16": lambda x: x.bfloat16() if x.is_floating_point() else x,
    "float16": lambda x: x.half() if x.is_floating_point() else x,
    "strided": lambda x: strided(x) if x.dim() > 1 else x,
}


def arguments(name, shape):
    op, make = ROWS[name]
    torch.manual_seed(zlib.crc32(f"{name} {shape}".encode()))
    return op, make(shape)


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_an_op_keeps_the_contract(name, shape):
    op, args = arguments(name, shape)
    check_op(op, *args)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ROWS)
def test_in_other_dtypes_and_strides(name, how):
    op, args = arguments(name, (4, 5, 41))
    check_op(op, *[HOW[how](x) if isinstance(x, Tensor) else x for x in args], second=False)
