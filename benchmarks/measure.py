"""Measuring: peers stepped in turn, so that noise hits all alike."""
import statistics
import time
from collections.abc import Callable

import torch


def interleaved(
    peers: dict[str, Callable[[int], torch.Tensor]], rounds: int, warmup: int = 2, before: Callable[[], object] = lambda: None
) -> tuple[dict, dict, dict]:
    """Step all peers in turn, `before` each: CPU seconds, wall seconds, and losses of each, by round."""
    cpu, wall, losses = ({name: [] for name in peers} for _ in range(3))
    for i in range(warmup + rounds):
        for name, step in peers.items():
            before()
            c, w = time.process_time(), time.perf_counter()
            loss = step(i)
            c, w = time.process_time() - c, time.perf_counter() - w
            losses[name].append(float(loss))
            if i >= warmup:
                cpu[name].append(c)
                wall[name].append(w)
    return cpu, wall, losses


def ratio(times: dict, name: str, peer: str) -> float:
    """The median over rounds of one's time over another's in the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times[peer], strict=True))


def agree(losses: dict, tolerance: float) -> None:
    """Exit unless all peers saw the same losses: a ratio between different computations says nothing."""
    reference = next(iter(losses.values()))
    for name, seen in losses.items():
        worst = max(abs(a - b) / abs(b) for a, b in zip(seen, reference, strict=True))
        if worst > tolerance:
            raise SystemExit(f"losses disagree: {name} is off by {worst:.1e} (relative), more than {tolerance:.0e}: {seen[:4]}...")
