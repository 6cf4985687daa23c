"""The README's table and the plot docs/benchmarks.png, from runs that `python -m benchmarks NAME --save` has kept.

A claim is a key of a benchmark's ratios and, in its module's CLAIMS, its words. What no saved run has measured is not claimed.
"""
import importlib
import json
import platform
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OPEN, CLOSE = "<!-- benchmarks: written by `python -m benchmarks report` -->", "<!-- end of benchmarks -->"


def save(name: str, ratios: dict[str, float], quick: bool) -> Path:
    """Keep a run's ratios, with the machine and the day."""
    found = {
        "bench": name, "quick": quick, "date": date.today().isoformat(), "torch": torch.__version__, "machine": machine(),
        "ratios": {key: round(value, 3) for key, value in ratios.items()},
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


def machine() -> str:
    models = [line.partition(":")[2].strip() for line in cpuinfo() if line.startswith("model name")]
    return f"{len(models) or '?'} cores, {models[0] if models else platform.processor()}"


def cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def saved() -> list[dict]:
    """All runs that were kept, in the order of the benchmarks' names."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def claims(runs: list[dict]) -> list[tuple[str, float, str]]:
    """(what is measured, fspeed over peer, the command) of each claim that was measured."""
    return [
        (words, run["ratios"][key], f"python -m benchmarks {run['bench']}{' --quick' * run['quick']}")
        for run in runs for key, words in importlib.import_module(f"benchmarks.{run['bench']}").CLAIMS.items()
        if key in run["ratios"]
    ]


def table(runs: list[dict]) -> str:
    """The claims as Markdown."""
    rows = [f"| {words} | {value:.2f} | `{command}` |" for words, value, command in claims(runs)]
    machines = sorted({f"{run['machine']}, torch {run['torch']}" for run in runs})
    days = sorted({run["date"] for run in runs})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return "\n".join(["| what | fspeed / peer | command |", "|---|---|---|", *rows, "", f"{'; '.join(machines)}; {when}."])


def plot(runs: list[dict], path: Path) -> None:
    """A bar a claim; the line at 1 is the peer."""
    import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    found = claims(runs)[::-1]
    figure, axes = plt.subplots(figsize=(9, 1 + 0.28 * len(found)), layout="constrained")
    values = [value for _, value, _ in found]
    bars = axes.barh([words for words, _, _ in found], values, color=["#2a6f97" if v <= 1 else "#c05746" for v in values])
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("fspeed over peer, in one run: left of the line is better")
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write() -> str:
    """Write table and plot; says what was written."""
    runs = saved()
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, opened, rest = text.partition(OPEN)
    _, closed, after = rest.partition(CLOSE)
    if not opened or not closed:
        raise SystemExit(f"README.md has no place for the table: want the lines\n{OPEN}\n{CLOSE}")
    readme.write_text(f"{before}{OPEN}\n{table(runs)}\n{CLOSE}{after}")
    plot(runs, ROOT / "docs" / "benchmarks.png")
    return f"README.md and docs/benchmarks.png: {len(claims(runs))} claims of {len(runs)} benchmarks"
