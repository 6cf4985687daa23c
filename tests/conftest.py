"""What all tests share: one thread, Hypothesis profiles, and markers that nobody has to remember."""

import os
import re
from functools import cache
from pathlib import Path

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("here", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")

IMPORTS_JAX = re.compile(r"""(^\s*(import|from)\s+|importorskip\(["'])(jax|optax|equinox|flax)\b""", re.MULTILINE)


@cache
def imports_jax(file: Path) -> bool:
    """Whether a source file imports JAX or a library on it, at its top or in a function."""
    return bool(IMPORTS_JAX.search(file.read_text()))


def pytest_configure() -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if imports_jax(item.path):
            item.add_marker("jax")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
