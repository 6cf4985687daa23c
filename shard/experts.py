"""A mixture of experts over an axis: tokens go to the ranks that have their experts, by all-to-all, and come back."""
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .collectives import all_to_all, pmax, psum
from .mesh import Axis


class Mixed(NamedTuple):
    """What a mixture gives: its output, and two numbers, the same on every rank, to be added to a loss.

        loss + Loss((a balance + b z) loss.weight, 0):    their mean over ranks is themselves

    Attributes:
        out: as the tokens.
        balance: E sum over experts e of f_e P_e, at least 1: f_e the fraction of all tokens whose first choice is e, P_e the mean
            of its probability over all tokens.
        z: the mean of log(sum exp logits)^2 over all tokens.
        dropped: how many choices of this rank's tokens found no room.
    """
    out: Tensor
    balance: Tensor
    z: Tensor
    dropped: Tensor


def mixture_of_experts(
    x: Tensor, router: Tensor, experts: Callable[[Any, Tensor], Tensor], params: Any, axis: Axis, *, k: int = 2,
    capacity_factor: float | None = None, min_capacity: int = 4, over: Sequence[Axis] = (),
) -> Mixed:
    """Each token through the k experts that a router likes best.

        y = sum over its k experts e of g_e experts_e(x),    p = softmax(x router^T)
        g = p of the one for k = 1, else p over the sum of the k chosen

    Without a capacity no choice is dropped. With one, an expert takes of each rank at most

        C = max(min_capacity, ceil(k tokens capacity_factor / E))

    choices, all first choices before all second ones, each in the order of the tokens; tokens being the most that any rank has.
    What is dropped depends on how the batch is divided, as it does in every framework: it is the one exception to equal answers.

    Args:
        x: (tokens, width), this rank's.
        router: (E, width), whole on every rank.
        experts: (params, (E / size, n, width)) -> (E / size, n, out): this rank's experts, each on its n tokens.
        params: their parameters, with a first dim of E / size.
        axis: the ranks that share the experts.
        k: 1 or 2.
        capacity_factor: what an expert has room for, over its even share; None: for all that come.
        min_capacity: the least room.
        over: the axes whose tokens are counted in `balance` and `z`; all that divide the batch, by default `axis`.

    Returns: `Mixed`.
    Raises: ValueError if k is not 1 or 2, or size does not divide the number of experts.
    Cost: 2 (size - 1) / size E C width elements sent, and as many in backward; the host waits for C, where there is no capacity
        the most that any expert is given by any rank. Buffers are padded to it.

    >>> out = mixture_of_experts(torch.ones(3, 2), torch.zeros(2, 2), lambda w, x: x * w, torch.ones(2, 1, 1),
    ...                          Axis("expert", 0, 0, 1, None), k=1)
    >>> out.out[0], out.balance
    (tensor([0.5000, 0.5000]), tensor(1.))

    Source: Fedus et al., arXiv 2101.03961 (k = 1); Lepikhin et al., arXiv 2006.16668 (k = 2); Zoph et al., arXiv 2202.08906 (z).
    """
    count = router.shape[0]
    if k not in (1, 2):
        raise ValueError(f"mixture_of_experts: k must be 1 or 2, got {k!r}")
    if count % axis.size or count < k:
        where = f"on the {axis.size} ranks of axis {axis.name!r}, which must divide them"
        raise ValueError(f"mixture_of_experts: {count} experts for k={k} {where}")
    logits = (x @ router.t()).to(torch.promote_types(x.dtype, torch.float32))
    probabilities = logits.softmax(-1)
    gates, chosen = probabilities.topk(k)
    gates = gates if k == 1 else gates / gates.sum(-1, keepdim=True)
    place = places(chosen, count)
    room = capacity(chosen, count, len(x), axis, capacity_factor, min_capacity)
    kept = place < room
    slot = torch.where(kept, chosen * room + place, count * room).t().reshape(-1)         # the last is for what is dropped
    sent = x.new_zeros(count * room + 1, x.shape[1]).index_add(0, slot, x.repeat(k, 1))[:-1]
    arrived = all_to_all(sent.view(count, room, x.shape[1]), axis, split_dim=0, concat_dim=1)
    back = all_to_all(experts(params, arrived), axis, split_dim=1, concat_dim=0).flatten(0, 1)
    found = torch.cat((back, back.new_zeros(1, back.shape[1])))[slot].unflatten(0, (k, len(x)))
    out = (found * gates.t().unsqueeze(-1).to(found.dtype)).sum(0)
    balance, z = losses(logits, probabilities, chosen[:, 0], over or (axis,))
    return Mixed(out, balance, z, (~kept).sum())


def places(chosen: Tensor, count: int) -> Tensor:
    """How many choices of the same expert come before each: first choices first, in the order of tokens. (tokens, k)."""
    ones = torch.nn.functional.one_hot(chosen.t().reshape(-1), count)
    before = (ones.cumsum(0) - ones).mul(ones).sum(-1)
    return before.view(chosen.shape[1], len(chosen)).t()


def capacity(chosen: Tensor, count: int, tokens: int, axis: Axis, factor: float | None, least: int) -> int:
    """How many choices an expert takes of each rank."""
    if factor is None:
        return max(1, int(pmax(torch.bincount(chosen.reshape(-1), minlength=count).max(), axis)))
    most = int(pmax(torch.tensor(tokens, device=chosen.device), axis))
    return max(least, math.ceil(chosen.shape[1] * most * factor / count))


def losses(logits: Tensor, probabilities: Tensor, first: Tensor, over: Sequence[Axis]) -> tuple[Tensor, Tensor]:
    """The balance and z losses of all ranks' tokens."""
    count = logits.shape[-1]
    chosen = torch.bincount(first, minlength=count).to(logits.dtype)
    z = logits.logsumexp(-1).square().sum()
    sums = torch.cat((chosen, probabilities.sum(0), z.view(1), logits.new_full((1,), len(logits))))
    for axis in over:
        sums = psum(sums, axis)
    chosen, likely, z, tokens = sums.split([count, count, 1, 1])
    tokens = tokens.detach().clamp(min=1)
    return count * (chosen * likely).sum() / tokens.squeeze().square(), (z / tokens).squeeze()
