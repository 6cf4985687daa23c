"""Measuring: peers stepped in turn, so that noise hits all alike."""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def interleaved(
    peers: dict[str, Callable[[int], torch.Tensor]], rounds: int, warmup: int = 2, before: Callable[[], object] = lambda: None,
    late: Callable[[], bool] = lambda: False,
) -> tuple[dict, dict, dict]:
    """Step all peers in turn, `before` each, until it is `late`: CPU seconds, wall seconds, and losses of each, by round."""
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
        if i >= warmup and late():
            break
    return cpu, wall, losses


def on_ranks(
    peers: dict, rounds: int, seconds: float, warmup: int = 2, tolerance: float = 1e-4, apart: tuple[str, ...] = ()
) -> tuple[dict, dict]:
    """`interleaved` on all ranks, for about so many seconds: the slowest one's wall time, all CPU time.

    Losses must agree, but for peers that stand `apart`.
    """
    end = time.monotonic() + seconds

    def late() -> bool:
        flag = torch.tensor(float(time.monotonic() > end))
        dist.all_reduce(flag)
        return bool(flag)

    cpu, wall, losses = interleaved(peers, rounds, warmup, before=dist.barrier, late=late)
    agree({name: seen for name, seen in losses.items() if name not in apart}, tolerance)
    for times, how in ((wall, dist.ReduceOp.MAX), (cpu, dist.ReduceOp.SUM)):
        for name, seen in times.items():
            t = torch.tensor(seen, dtype=torch.float64)
            dist.all_reduce(t, how)
            times[name] = t.tolist()
    return wall, cpu


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


def job(module: str, *args: Any, ranks: int) -> Any:
    """What `python -m module result *args` writes into the file `result` under torchrun, on so many ranks of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run([*torchrun, "-m", module, str(out), *map(str, args)], env=env, text=True, capture_output=True)
        if done.returncode:
            raise SystemExit(f"{module} {' '.join(map(str, args))} failed:\n{done.stderr[-3000:]}")
        return json.loads(out.read_text())
