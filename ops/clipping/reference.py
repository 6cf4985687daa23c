"""The sum of squares, in at least float32."""
import torch
from torch import Tensor


def sum_of_squares(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().sum()
