"""Rows of the contract: compression. Numbers are drawn again until float32 and float64 choose the same codes."""
import torch

from fspeed.ops import compress


def drawn(shape, *rest):
    same = lambda x: torch.equal(compress.QUANTISE(x, *rest)[0], compress.QUANTISE(x.double(), *rest)[0])
    while True:
        x = torch.randn(shape)
        if same(x) and same(x.half()) and same(x.bfloat16()):
            return x, *rest


def bits(shape):
    n = torch.Size(shape).numel()
    return torch.randint(256, (3, -(-n // 8)), dtype=torch.uint8), torch.rand(3, -(-n // 64)), n, 64


def codes(shape):
    n = torch.Size(shape).numel()
    return torch.randint(256, (-(-n // 2),), dtype=torch.uint8), torch.rand(-(-n // 64)), n, 4, 64


ROWS = {
    "sign_pack": (compress.SIGN_PACK, lambda shape: (torch.randn(shape), torch.randn(shape), 64)),
    "sign_unpack": (compress.SIGN_UNPACK, bits),
    "quantise8": (compress.QUANTISE, lambda shape: drawn(shape, None, 0, 8, 64)),
    "quantise4": (compress.QUANTISE, lambda shape: drawn(shape, None, 0, 4, 64)),
    "dequantise": (compress.DEQUANTISE, codes),
}
