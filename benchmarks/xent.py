"""A language model's head and loss, forward and backward, without the logits: against `cross_entropy(linear(x, W), targets)`.

768 features and 50257 tokens of vocabulary, as GPT-2 small has them. Peaks are of 8192 tokens, times of 2048.
"""
import statistics

import torch
from torch.nn.functional import cross_entropy, linear

from benchmarks.measure import agree, interleaved, ratio
from fspeed.ops.xent import linear_cross_entropy, linear_cross_entropy_sum
from fspeed.testing.count import allocated_peak

CLAIMS = {
    "time": "head and cross entropy that never hold the logits, vocabulary 50k, against plain PyTorch, one thread: CPU time",
    "peak": "... allocated peak, 8192 tokens",
}
FEATURES, VOCABULARY = 768, 50257
PEERS = {
    "plain": lambda x, w, t: cross_entropy(linear(x, w), t),
    "fspeed, sum": lambda x, w, t: linear_cross_entropy_sum(x, w, t) / len(t),
    "fspeed, by token": lambda x, w, t: linear_cross_entropy(x, w, t).mean(),
}


def step(loss, tokens: int):
    """Loss and gradients, at one batch."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, FEATURES, generator=draw).requires_grad_()
    w = (torch.randn(VOCABULARY, FEATURES, generator=draw) * 0.02).requires_grad_()
    t = torch.randint(VOCABULARY, (tokens,), generator=draw)

    def run(_: int) -> torch.Tensor:
        out = loss(x, w, t)
        x.grad = w.grad = None
        out.backward()
        return out.detach()

    return run


def run(quick: bool) -> tuple[list[dict], dict[str, float]]:
    torch.set_num_threads(1)
    rounds, many, few = (3, 8192, 1024) if quick else (7, 8192, 2048)
    cpu, _, losses = interleaved({name: step(loss, few) for name, loss in PEERS.items()}, rounds, warmup=1)
    agree(losses, 1e-5)
    peaks = {}
    for name, loss in PEERS.items():
        once = step(loss, many)
        peaks[name] = allocated_peak(lambda once=once: once(0))
    rows = [{
        "what": name, "CPU ms": statistics.median(cpu[name]) * 1e3, "over plain": ratio(cpu, name, "plain"),
        "peak MB": peaks[name] / 1e6, "over": peaks[name] / peaks["plain"],
    } for name in PEERS]
    return rows, {"time": ratio(cpu, "fspeed, sum", "plain"), "peak": peaks["fspeed, sum"] / peaks["plain"]}
