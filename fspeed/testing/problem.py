"""A small training problem with everything in it that has gone wrong somewhere: what laws are tried on."""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fspeed import random
from fspeed.layer import layer
from fspeed.loss import Loss, mean

VOCAB, WIDTH, LENGTH = 13, 6, 5


@dataclass(frozen=True)
class Problem:
    """Parameters, a loss on them and how to cut it; `batch(seed, rows)` makes a batch of any number of rows.

    >>> p = problem()
    >>> [x.shape for x in p.batch(0, 4)]
    [torch.Size([4, 5]), torch.Size([4, 5])]
    """
    params: Any
    loss: Callable
    layers: Any = "blocks/*"
    trainable: Any = "**"
    batch: Callable[[int, int], Any] = lambda seed, rows: tokens(seed, rows)


def tokens(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets: int64 (rows, 5)."""
    x = torch.randint(0, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    return x, x.roll(-1, 1)


def problem(seed: int = 0, depth: int = 3, rate: float = 0.2) -> Problem:
    """A language model in miniature: tied embedding, dropout, a layer used twice, masked targets, two metrics.

    Its tree has frozen, integer, empty, 0-d and strided leaves, and one that is used in some rows only.

    Args:
        seed: of the parameters.
        depth: how many blocks.
        rate: of dropout.

    Returns:
        A `Problem` with about 500 parameters.

    >>> sorted(problem().params)
    ['blocks', 'empty', 'head', 'scale', 'table', 'wte']
    """
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g) * 0.4
    wte = normal(VOCAB, WIDTH)
    params = {
        "wte": wte, "head": wte, "scale": torch.tensor(1.5), "empty": torch.zeros(0, 8), "table": torch.arange(LENGTH),
        "blocks": [
            {"w": normal(WIDTH, WIDTH).t(), "b": normal(WIDTH), "frozen": normal(WIDTH), "rare": normal(3)} for _ in range(depth)
        ],
    }

    @layer
    def block(p, x, y, key):
        h = torch.tanh(x @ p["w"] + p["b"]) * p["frozen"]
        h = h + torch.where(y[..., None] == 0, p["rare"].sum(), 0.0).to(h.dtype)
        return x + (h if key is None else random.dropout(key, h, rate))

    def loss(params, batch, key):
        x, y = batch
        h = params["wte"][x] * params["scale"]
        for i, p in enumerate((*params["blocks"], params["blocks"][0])):        # the first again: weights used twice
            h = block(p, h, y, None if key is None else key.fold_in(i))
        logits = (h @ params["head"].t()).flatten(0, 1)
        losses = F.cross_entropy(logits.float(), y.flatten(), reduction="none")
        right = (logits.argmax(-1) == y.flatten()).float()
        length = Loss(torch.tensor(float(x.numel())), torch.tensor(float(len(x))))
        return mean(losses, y.flatten() % 3 > 0), {"accuracy": mean(right), "length": length}

    return Problem(params, loss, trainable=lambda path: not path.endswith("frozen"))
