"""Every op in one table: each `rows_*.py` beside it names ops with how to make their arguments, all are held to one contract.

    ROWS = {"name": (op, lambda shape: arguments)}
"""
import importlib
import zlib
from pathlib import Path

import pytest
import torch

from fspeed.testing.ops import check_op

pytest.importorskip("triton")

SIZES = [(1,), (17,), (63,), (130,), (1025,), (9, 7, 41)]
FILES = sorted(file.stem for file in Path(__file__).parent.glob("rows_*.py"))
ROWS = {f"{file[5:]}: {name}": row for file in FILES for name, row in importlib.import_module(f"tests.ops.{file}").ROWS.items()}


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_an_op_keeps_the_contract(name, shape):
    made, arguments = ROWS[name]
    torch.manual_seed(zlib.crc32(f"{name} {shape}".encode()))
    check_op(made, *arguments(shape))
