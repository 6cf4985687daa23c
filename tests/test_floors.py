"""The floors of the house: who may import whom.

- ops and shard import nothing of fspeed's but their own siblings, and these relatively.
- Transforms do not import each other; a file whose name begins with an underscore is a part of one, not a transform.
- Nothing inside fspeed imports the face, `fspeed/__init__.py`.
- Nobody imports the top-level names `ops` and `shard`: these are folders, the packages are fspeed.ops and fspeed.shard.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(file for top in ("fspeed", "ops", "shard", "tests", "examples", "benchmarks") for file in (ROOT / top).rglob("*.py"))


def test_floors() -> None:
    assert len(FILES) > 5
    broken = [line for file in FILES for line in violations(file.relative_to(ROOT).as_posix(), file.read_text())]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize(
    "file, source",
    [
        ("ops/adam/kernel.py", "from fspeed.tree import map"),
        ("ops/adam/kernel.py", "import fspeed.tree as tree"),
        ("ops/adam/kernel.py", "from fspeed.ops.adam import reference"),
        ("ops/adam/kernel.py", "from ...shard import mesh"),
        ("ops/adam/kernel.py", "from ... import tree"),
        ("shard/mesh.py", "from ..ops import adam"),
        ("shard/mesh.py", "from .. import ops"),
        ("shard/mesh.py", "def f():\n    from fspeed import step"),
        ("fspeed/transforms/zero.py", "from fspeed.transforms.clip import clip"),
        ("fspeed/transforms/zero.py", "from .clip import clip"),
        ("fspeed/transforms/zero.py", "from . import clip"),
        ("fspeed/transforms/zero.py", "import fspeed.transforms.clip as clip"),
        ("fspeed/transforms/_regather.py", "from .zero import zero_shard"),
        ("fspeed/step.py", "import fspeed"),
        ("fspeed/step.py", "import fspeed as fs"),
        ("fspeed/step.py", "import fspeed.tree"),
        ("fspeed/step.py", "from fspeed import Loss"),
        ("fspeed/step.py", "from . import Loss"),
        ("fspeed/optim/adam.py", "from .. import Loss"),
        ("fspeed/step.py", "import ops"),
        ("tests/test_step.py", "from shard.mesh import mesh"),
    ],
)
def test_a_break_is_seen(file: str, source: str) -> None:
    line = source.count("\n") + 1
    assert [v.split(": ")[0] for v in violations(file, source)] == [f"{file}:{line}"]


@pytest.mark.parametrize(
    "file, source",
    [
        ("ops/adam/kernel.py", "import torch\nfrom ..common import pad\nfrom . import reference\nfrom .reference import adam"),
        ("fspeed/transforms/__init__.py", "from .clip import clip as clip\nfrom . import zero as zero"),
        ("fspeed/transforms/zero.py", "from fspeed.step import step\nfrom ..shard import mesh\nfrom fspeed import ops, shard"),
        ("fspeed/transforms/zero.py", "from fspeed.transforms._regather import regather"),
        ("fspeed/step.py", "import fspeed.shard as shard\nfrom .tree import map\nfrom . import shard"),
        ("tests/test_step.py", "import fspeed as fs\nfrom fspeed import shard"),
    ],
)
def test_the_rest_is_free(file: str, source: str) -> None:
    assert violations(file, source) == []


def violations(file: str, source: str) -> list[str]:
    """One line `file:line: why` for each import that breaks a floor; `file` is relative to the root of the repository."""
    package, *rest = file.removesuffix(".py").split("/")
    module = [package, *rest] if package == "fspeed" else ["fspeed", package, *rest]
    why = {"ops": of_ground, "shard": of_ground, "fspeed": of_house}.get(package, of_anybody)
    found = [(line, why(module, target, level)) for line, target, level in imports(module[:-1], source)]
    return [f"{file}:{line}: {problem}" for line, problem in found if problem]


def imports(package: list[str], source: str) -> Iterator[tuple[int, list[str], int]]:
    """(line, dotted name as a list, level) for each name imported anywhere in the source; relative names are made absolute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            for alias in node.names:
                yield node.lineno, base + (node.module.split(".") if node.module else []) + [alias.name], node.level
        elif isinstance(node, ast.Import):
            for alias in node.names:  # `import a.b` binds a, `import a.b as b` binds a.b
                yield node.lineno, alias.name.split(".") if alias.asname else [alias.name.split(".")[0]], 0


def of_ground(module: list[str], target: list[str], level: int) -> str:
    if target[0] == "fspeed" and (not level or target[:2] != module[:2] or len(target) < 3):
        return f"{module[1]} imports {'.'.join(target)}: it may import only its own siblings, relatively"
    return of_anybody(module, target, level)


def of_house(module: list[str], target: list[str], level: int) -> str:
    both = module[:2] == target[:2] == ["fspeed", "transforms"]
    if both and module[2] != "__init__" and not (len(target) > 3 and target[2].startswith("_")):
        return f"a transform imports {'.'.join(target)}: transforms know nothing of each other"
    face = target == ["fspeed"] or (target[0] == "fspeed" and len(target) == 2 and not only_a_module(target[1]))
    if face and module != ["fspeed", "__init__"]:
        return f"imports {'.'.join(target)} from the face: import it from the module that defines it"
    return of_anybody(module, target, level)


def of_anybody(module: list[str], target: list[str], level: int) -> str:
    return f"imports top-level {target[0]}: import fspeed.{target[0]}" if target[0] in ("ops", "shard") else ""


def only_a_module(name: str) -> bool:
    """Whether fspeed.<name> is a module, and the face has nothing else under that name."""
    face = ast.parse((ROOT / "fspeed/__init__.py").read_text())
    froms = [node for node in face.body if isinstance(node, ast.ImportFrom) and node.module not in (None, "fspeed")]
    defined = {alias.asname or alias.name for node in froms for alias in node.names}
    here = ROOT / "fspeed" / name
    return name not in defined and (here.with_suffix(".py").exists() or here.is_dir())
