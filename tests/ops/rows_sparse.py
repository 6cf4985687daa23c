"""Block-sparse attention in the table of contracts: Nq is the last of the shape, batch and heads are those before."""
import torch

from fspeed.ops.sparse import Layout, attention

D = 8


def drawn(shape, Nk=None, each=False, group=1):
    """q, k, v, a layout of random elements and a random generator."""
    draw = torch.Generator().manual_seed(3)
    batch, Hq, Nq = (1,) * (3 - len(shape)) + tuple(shape)
    Hq, Nk = Hq * group, Nk or Nq
    block = 16 if Nq < 200 else 256
    layout = Layout.of_elements(torch.rand(Hq if each else 1, Nq, Nk, generator=draw) < 0.4, block)
    q, k, v = (torch.randn(batch, H, N, D, generator=draw) for H, N in ((Hq, Nq), (Hq // group, Nk), (Hq // group, Nk)))
    return q, k, v, layout, draw


def plain(shape):
    q, k, v, layout, _ = drawn(shape)
    return q, k, v, None, None, None, *layout.tensors(), False, 0.3, 0.


def grouped(shape):
    """Grouped queries over other keys, a causal layout, biased and padded."""
    q, k, v, layout, draw = drawn(shape, Nk=shape[-1] + 5, group=2)
    bias = torch.randn(1, q.shape[1], 1, k.shape[2], generator=draw)
    padding = torch.rand(len(k), k.shape[2], generator=draw) < 0.8
    return q, k, v, bias, padding, None, *layout.tensors(), True, 0.3, 0.


def dropped(shape):
    """A layout a head, and dropout."""
    q, k, v, layout, _ = drawn(shape, each=True)
    key = torch.cat([torch.tensor([1, -2], dtype=torch.int32), torch.arange(len(q), dtype=torch.int32) + 3])
    return q, k, v, None, None, key, *layout.tensors(), False, 0.3, 0.4


ROWS = {
    "sparse_attention": (attention, plain),
    "sparse_attention, grouped": (attention, grouped),
    "sparse_attention, dropped": (attention, dropped),
}
