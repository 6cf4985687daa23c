"""python -m benchmarks NAME [--quick] [--save]: one claim, fspeed and its peers interleaved in one run.

Prints a table and, as its last line, JSON {"bench": NAME, "ratios": {...}}: fspeed over peer, smaller is better.
"""
import argparse
import importlib
import json

from rich.console import Console
from rich.table import Table

from benchmarks import report

NAMES = {
    "adam": "optimizers on the CPU: AdamW against PyTorch's, DeepSpeed's and plain C; Lion and LAMB",
    "overhead": "one process, eager: against the same loop written by hand",
    "jit": "one process, compiled: against torch.compile and the loop written by hand",
    "depth": "how long a step takes to compile, by its number of layers",
    "xent": "head and cross entropy of a language model, without the logits: against plain PyTorch",
    "zero": "two ranks over gloo (and four): against DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed",
    "pipeline": "1F1B on two and four ranks over gloo: against torch.distributed.pipelining",
    "tensor": "tensor parallelism on two ranks over gloo: against torch's parallelize_module",
    "overlap": "ZeRO-3 on two hosts joined at 1 Gbit/s: against FSDP2 (needs root)",
}


def main() -> None:
    names = {**NAMES, "report": "write the README's table and docs/benchmarks.png from what --save has kept"}
    about = "\n".join(f"  {name:10} {what}" for name, what in names.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=f"{__doc__}\n{about}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=names, metavar="NAME", help="which claim: " + ", ".join(names))
    parser.add_argument("--quick", action="store_true", help="fewer rounds: ends within two minutes")
    parser.add_argument("--save", action="store_true", help="keep the ratios in benchmarks/results/NAME.json, for the report")
    args = parser.parse_args()
    if args.name == "report":
        return print(report.write())

    rows, ratios = importlib.import_module(f"benchmarks.{args.name}").run(args.quick)
    console = Console(width=100)
    table = Table(title=f"{args.name}: {NAMES[args.name]}")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
    console.print("ratios: fspeed over peer, smaller is better")
    for key, value in ratios.items():
        console.print(f"  {key:24} {value:.3f}")
    if args.save:
        print(f"kept in {report.save(args.name, ratios, args.quick)}")
    print(json.dumps({"bench": args.name, "ratios": {k: round(v, 4) for k, v in ratios.items()}}))


if __name__ == "__main__":
    main()
