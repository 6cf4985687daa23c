"""How long a step takes to compile, by depth: layer by layer, as one graph, and under torch.compile.

Each run is a process of its own with an empty cache on disk, then another that finds the first one's cache; one thread. Seconds are
those of the first call less those of the second; `scope="layer"` compiles one layer, whatever the depth.
"""
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time

CLAIMS = {"layer48_vs_layer6": "compiling 48 layers by layer, against 6 layers: seconds"}
KINDS = {"layer": "fspeed jit, scope='layer'", "step": "fspeed jit", "peer": "torch.compile"}


def main(kind: str, layers: int) -> None:
    """Print the seconds of compiling a tiny GPT of so many layers, as JSON."""
    import torch

    import fspeed as fs
    from benchmarks import gpt
    from benchmarks.overhead import by_hand, functional

    torch.set_num_threads(1)
    size = dataclasses.replace(gpt.TINY, layers=layers)
    ours = lambda: functional(fs.jit(gpt.step(size), donate=True, scope=kind), size)
    step = by_hand(size, torch.compile) if kind == "peer" else ours()
    times = []
    for i in range(3):
        begun = time.perf_counter()
        step(i)
        times.append(time.perf_counter() - begun)
    print(json.dumps(times[0] - times[2]))


def seconds(kind: str, layers: int) -> tuple[float, float]:
    """Without a cache, and with the one that is left behind."""
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, "-m", "benchmarks.depth", kind, str(layers)]
        runs = [subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    cold, warm = (float(out.splitlines()[-1]) for out in runs)
    return cold, warm


def run(quick: bool) -> tuple[list[dict], dict[str, float]]:
    cases = [("layer", 6), ("layer", 48)] if quick else [
        *((kind, layers) for layers in (6, 12) for kind in KINDS), ("layer", 24), ("layer", 48), ("step", 24), ("peer", 24)
    ]
    found = {case: seconds(*case) for case in cases}
    rows = [
        {"what": f"{KINDS[kind]}, {layers} layers", "seconds": cold, "again, from disk": warm}
        for (kind, layers), (cold, warm) in found.items()
    ]
    ratios = {
        "layer48_vs_layer6": found["layer", 48][0] / found["layer", 6][0],
        "layer48_disk_vs_none": found["layer", 48][1] / found["layer", 48][0],
    }
    if not quick:
        ratios["step12_vs_compile12"] = found["step", 12][0] / found["peer", 12][0]
    return rows, ratios


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
