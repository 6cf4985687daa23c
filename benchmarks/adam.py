"""Optimizers on float32 parameters on the CPU: what fspeed's take for a parameter, on one flat shard and on many leaves.

Peers of AdamW are PyTorch's fused one, DeepSpeed's where it can be imported, and `adam.c`, a plain loop on one flat tensor. A
parameter is 28 bytes read and written by AdamW and by LAMB's least, 20 by Lion. Parameters must agree before anything is printed.
"""
import ctypes
import math
import statistics
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import fspeed as fs
from benchmarks.measure import interleaved, ratio
from fspeed.shard.mesh import mesh
from fspeed.shard.piece import shard
from fspeed.tree import cut

CLAIMS = {
    "adamw_vs_best_peer": "AdamW on one flat shard, one thread, against the faster of PyTorch's fused and DeepSpeed's: CPU time",
    "adamw_leaves_vs_best_peer": "... on 50 leaves",
    "adamw_vs_flat_c": "... against plain C on one flat tensor",
    "lion_vs_deepspeed": "Lion on one flat shard, one thread, against DeepSpeed's: CPU time",
}
LR, B1, B2, EPS, WD = 1e-3, 0.9, 0.95, 1e-8, 0.1
LEAVES = 50
BYTES = {"AdamW": 28, "Lion": 20, "LAMB": 28}
FLAT, MANY, HAND = "fspeed AdamW, one flat shard", f"fspeed AdamW, {LEAVES} leaves", "plain C AdamW, one flat tensor"
Peer = tuple[list[Tensor], Callable[[int], object]]         # its parameters, and a step


def values(n: int, scale: float, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(n // LEAVES, generator=draw) * scale for _ in range(LEAVES)]


def functional(optimizer: fs.optim.GradientTransformation, params, grads) -> Peer:
    """fspeed's, as a donated step runs it."""
    box = [params, optimizer.init(params)]

    def step(i: int) -> None:
        box[:] = optimizer.apply(grads, box[1], box[0])

    return fs.shard.pytree.tree_leaves(params), step


def flat(tree: list[Tensor]):
    """A tree as `zero_shard` keeps it."""
    axis = mesh(data=1).axis("data")
    return cut({f"{i:02}": x for i, x in enumerate(tree)}, place=(("flat", lambda name, group: shard(group, axis)),))


def of_torch(make, params: list[Tensor], grads: list[Tensor]) -> Peer:
    params = [torch.nn.Parameter(p) for p in params]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    optimizer = make(params)
    return [p.detach() for p in params], lambda i: optimizer.step()


def by_hand(folder: str, params: list[Tensor], grads: list[Tensor]) -> Peer:
    """`adam.c`, compiled for this machine."""
    library = Path(folder) / "adam.so"
    source = Path(__file__).with_name("adam.c")
    options = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC"]
    if not library.exists():
        subprocess.run(["gcc", *options, str(source), "-o", str(library), "-lm"], check=True)
    kernel, pointer, number = ctypes.CDLL(str(library)).adamw, ctypes.c_void_p, ctypes.c_float
    kernel.argtypes, kernel.restype = [pointer] * 4 + [ctypes.c_long, ctypes.c_int] + [number] * 5, None
    p, g = torch.cat(params), torch.cat(grads)
    m, v = torch.zeros_like(p), torch.zeros_like(p)

    def step(i: int) -> None:
        c1, c2 = 1 - B1 ** (i + 1), math.sqrt(1 - B2 ** (i + 1))
        rows = [x.data_ptr() for x in (p, g, m, v)]
        kernel(*rows, len(p), torch.get_num_threads(), B1, B2, LR * c2 / c1, EPS * c2, 1 - LR * WD)

    return [p], step


def of_deepspeed(name: str):
    """DeepSpeed's optimizer by name, or None where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from deepspeed.ops import adam, lion
    except ImportError:
        return None
    return getattr(adam if "Adam" in name else lion, name)


def peers(n: int, folder: str) -> dict[str, Peer]:
    start, grads = (lambda: values(n, 1.0, 0)), values(n, 1e-2, 1)
    adamw, lion = fs.optim.adamw(LR, B1, B2, EPS, weight_decay=WD), fs.optim.lion(LR, B1, B2, weight_decay=WD)
    how = {"lr": LR, "betas": (B1, B2), "weight_decay": WD}
    found = {
        FLAT: functional(adamw, flat(start()), flat(grads)), MANY: functional(adamw, start(), grads),
        "torch AdamW, fused": of_torch(lambda ps: torch.optim.AdamW(ps, eps=EPS, fused=True, **how), start(), grads),
        HAND: by_hand(folder, start(), grads),
        "fspeed Lion, one flat shard": functional(lion, flat(start()), flat(grads)),
        "fspeed LAMB, one flat shard": functional(fs.optim.lamb(LR, B1, B2, EPS, weight_decay=WD), flat(start()), flat(grads)),
    }
    if adam := of_deepspeed("DeepSpeedCPUAdam"):
        found["DeepSpeedCPUAdam"] = of_torch(lambda ps: adam(ps, eps=EPS, adamw_mode=True, **how), start(), grads)
    if ds_lion := of_deepspeed("DeepSpeedCPULion"):
        found["DeepSpeedCPULion"] = of_torch(lambda ps: ds_lion(ps, **how), start(), grads)
    return found


def family(name: str) -> str:
    return next(f for f in ("Lion", "LAMB", "AdamW") if f in name or f == "AdamW")


def agree(found: dict[str, Peer]) -> None:
    """Exit unless all peers of one optimizer are at the same parameters: a ratio between different computations says nothing."""
    first: dict[str, tuple[str, Tensor]] = {}
    for name, (params, _) in found.items():
        mine = torch.cat([p.reshape(-1) for p in params])
        other, expected = first.setdefault(family(name), (name, mine))
        off = ((mine[: len(expected)] - expected[: len(mine)]).abs() > 1e-5 * (1 + expected[: len(mine)].abs())).double().mean()
        if off > (1e-4 if family(name) == "Lion" else 0):           # the sign of what cancels is rounding's to choose
            raise SystemExit(f"parameters disagree: {off:.1e} of those of {name} are not those of {other}")


def run(quick: bool) -> tuple[list[dict], dict[str, float]]:
    n, rounds = (10_000_000, 9) if quick else (50_000_000, 15)
    rows, ratios = [], {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory() as folder:
            found = peers(n, folder)

            def stepped(step: Callable[[int], object]) -> Callable[[int], Tensor]:
                return lambda i: (step(i), torch.zeros(()))[1]

            cpu, wall, _ = interleaved({name: stepped(step) for name, (_, step) in found.items()}, rounds)
        agree(found)
        times = cpu if threads == 1 else wall
        for name in found:
            ns = statistics.median(times[name]) / n * 1e9
            rows.append({
                "what": name, "threads": threads, "ns a parameter": ns, "GB/s": BYTES[family(name)] / ns,
                "best ns": min(times[name]) / n * 1e9,
            })
        at = "" if threads == 1 else "_2_threads"
        adams = [p for p in found if "fspeed" not in p and p != HAND and family(p) == "AdamW"]
        best = min(adams, key=lambda p: statistics.median(times[p]))
        ratios[f"adamw_vs_best_peer{at}"] = ratio(times, FLAT, best)
        ratios[f"adamw_leaves_vs_best_peer{at}"] = ratio(times, MANY, best)
        ratios[f"adamw_vs_flat_c{at}"] = ratio(times, FLAT, HAND)
        if "DeepSpeedCPULion" in found:
            ratios[f"lion_vs_deepspeed{at}"] = ratio(times, "fspeed Lion, one flat shard", "DeepSpeedCPULion")
        else:
            ratios[f"lion_vs_adamw{at}"] = ratio(times, "fspeed Lion, one flat shard", FLAT)
        ratios[f"lamb_vs_adamw{at}"] = ratio(times, "fspeed LAMB, one flat shard", FLAT)
    return rows, ratios
