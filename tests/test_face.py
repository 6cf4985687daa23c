"""The face is small, every name on it teaches by an example that runs, and so does every docstring of every module.

An example on the face sees `torch`, `fs`, the names of the face and what it imports: a reader can paste it. Any other example sees
the names of its own module too.
"""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import fspeed

OPTIONAL = {"jax", "jaxlib", "optax", "equinox", "flax", "triton"}
TOPS = {"fspeed", "ops", "shard"}
IMPORTS_JAX = re.compile(r"^\s*(import|from)\s+(jax|optax)\b", re.MULTILINE)


def face() -> list[str]:
    """The names that fspeed/__init__.py imports to hand on."""
    tree = ast.parse(inspect.getsource(fspeed))
    return [a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names]


def modules() -> list[object]:
    found = ["fspeed", *(m.name for m in pkgutil.walk_packages(fspeed.__path__, "fspeed.") if not m.name.endswith("__main__"))]
    return [pytest.param(name, marks=pytest.mark.jax if IMPORTS_JAX.search(source(name).read_text()) else ()) for name in found]


def source(module: str) -> Path:
    spec = find_spec(module)
    assert spec and spec.origin
    return Path(spec.origin)


def examples(thing: object, name: str, seen: dict[str, object]) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(recurse=name.startswith("fspeed"))  # a module that is on the face: its own docstring alone
    return [test for test in finder.find(thing, name, globs={"torch": torch, "fs": fspeed, **seen}) if test.examples]


def run(tests: list[doctest.DocTest]) -> None:
    runner, said = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE), list[str]()
    for test in tests:
        runner.run(test, out=said.append)
    assert not runner.failures, "\n" + "".join(said)


def test_the_face_is_small() -> None:
    assert len(face()) < 40
    assert len(set(face())) == len(face())


@pytest.mark.parametrize("name", face())
def test_a_name_on_the_face_teaches_by_example(name: str) -> None:
    tests = examples(getattr(fspeed, name), name, {name: getattr(fspeed, name) for name in face()})
    assert tests, f"fspeed.{name} has no `>>>` example in its docstring"
    run(tests)


@pytest.mark.parametrize("name", modules())
def test_the_examples_of_a_module_run(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"needs {error.name}")
    run(examples(module, name, vars(module)))


def test_no_module_is_there_twice() -> None:
    """The links must not make two modules of one file."""
    root = source("fspeed").resolve().parents[1]
    paths = {name: Path(file).resolve() for name, module in sys.modules.items() if (file := getattr(module, "__file__", None))}
    ours = [(path, name) for name, path in paths.items() if path.is_relative_to(root) and name.split(".")[0] in TOPS]
    assert len({path for path, _ in ours}) == len(ours) > 3, sorted(ours)
    assert all(name.startswith("fspeed") for _, name in ours)
