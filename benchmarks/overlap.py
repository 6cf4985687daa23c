"""ZeRO-3 over a slow link, against FSDP2: two ranks in network namespaces of their own joined at 1 Gbit/s, which needs root.

The units of both are the blocks and the output layer, which is needed last and whose gradients are there first. Hidden is the share
of the time that the link needs for what is sent, which a step does not take longer than without any sending.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import fspeed as fs
from benchmarks import gpt
from benchmarks.measure import on_ranks, ratio
from benchmarks.zero import elements_sent, fsdp2, fspeed

CLAIMS = {
    "z3_vs_fsdp2_1gbit": "ZeRO-3 over 1 Gbit/s, against FSDP2: time",
    "z3_bf16_vs_fsdp2_1gbit": "... gathers and reductions in bfloat16",
}
RATE = 1e9                                  # bits a second, each way
LOW, ALONE = " in bf16", "fspeed, nothing sent"
NEEDED = "python -m benchmarks overlap makes network namespaces and limits their rate, which needs root and the tools ip and tc"


def run(quick: bool) -> tuple[list[dict], dict[str, float]]:
    if os.geteuid():
        raise SystemExit(NEEDED)
    rounds, seconds = (4, 30) if quick else (20, 240)
    results = [on_link(low, rounds, seconds) for low in (False, True)]
    rows, ratios = [], {}
    for low, (wall, sent, size) in zip(("", LOW), results, strict=True):
        ms = {name: statistics.median(times) * 1e3 for name, times in wall.items()}
        link = sent * size * 8 / RATE * 1e3
        alone, ours = ms[ALONE], ms["fspeed zero 3"]
        hidden = {name: 1 - (ms[name] - alone) / link for name in ("fspeed zero 3", "FSDP2")}
        rows += [{
            "what": f"{name}{low}", "ms": ms[name], "over FSDP2": ratio(wall, name, "FSDP2"),
            "ms on the link": link if name in hidden else 0.0, "hidden": hidden.get(name, "-"),
        } for name in ms]
        key = "z3_bf16" if low else "z3"
        ratios[f"{key}_vs_fsdp2_1gbit"] = ratio(wall, "fspeed zero 3", "FSDP2")
        ratios[f"{key}_exposed"] = (ours - alone) / link
    return rows, ratios


# ---------------------------------------------------------------- two hosts and a link
@contextmanager
def hosts() -> Iterator[list[str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, joined at RATE; they are gone afterwards."""
    names = [f"fspeed{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            call(f"ip netns add {name}")
        call(f"ip link add veth0 netns {names[0]} type veth peer name veth0 netns {names[1]}")
        for i, name in enumerate(names):
            call(f"ip -n {name} addr add 10.77.0.{i + 1}/24 dev veth0")
            call(f"ip -n {name} link set veth0 up")
            call(f"ip -n {name} link set lo up")
            call(f"tc -n {name} qdisc add dev veth0 root tbf rate {RATE:.0f}bit burst 256kb limit 4mb")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def call(command: str) -> None:
    try:
        subprocess.run(command.split(), check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{NEEDED}; `{command}` failed: {getattr(error, 'stderr', error)}") from error


def on_link(low: bool, rounds: int, seconds: float) -> tuple[dict, int, int]:
    """Wall times of all peers, elements that a rank of fspeed sends a step, and bytes of each."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "veth0"}
    with hosts() as names, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        torchrun = (
            f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --master-addr 10.77.0.1 --master-port 29511"
        ).split()
        what = ["-m", "benchmarks.overlap", str(out), str(int(low)), str(rounds), str(seconds)]
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *torchrun, "--node-rank", str(i), *what], env=env, stderr=subprocess.PIPE, text=True
            )
            for i, name in enumerate(names)
        ]
        said = [process.communicate()[1] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit(f"benchmarks.overlap failed:\n{said[0][-3000:]}")
        wall, sent, size = json.loads(out.read_text())
        return wall, sent, size


def worker(out: str, low: str, rounds: str, seconds: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size, short = dist.get_rank(), gpt.Size(), low == "1"
    cast = (lambda s: fs.mixed_precision(s, torch.bfloat16, reduce=torch.bfloat16)) if short else lambda s: s
    bare = fs.donate(gpt.step(size, ("blocks/*", "head")))
    ours = fspeed(cast(fs.zero_shard(bare, fs.mesh(data=-1), stage=3)), size, rank)
    peers = {"FSDP2": fsdp2(size, rank, short, head=True), "fspeed zero 3": ours, ALONE: fspeed(cast(bare), size, rank)}
    tolerance = 2e-2 if short else 1e-4         # bfloat16 has 8 bits, and the two round at different places
    wall, _ = on_ranks(peers, int(rounds), float(seconds), tolerance=tolerance, apart=(ALONE,))
    sent = elements_sent(ours, size)
    if rank == 0:
        Path(out).write_text(json.dumps((wall, sent, 2 if short else 4)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    worker(*sys.argv[1:])
