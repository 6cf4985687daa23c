"""A wheel, built from a checkout or from an sdist, holds real files where a checkout has links, and works from an empty folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SDIST = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
SMOKE = """
import sys
import fspeed, fspeed.ops, fspeed.optim, fspeed.shard, fspeed.testing, fspeed.transforms
for module in (fspeed, fspeed.ops, fspeed.shard):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
"""


def python(*args: object, cwd: Path, **env: str) -> str:
    ran = subprocess.run([sys.executable, *map(str, args)], cwd=cwd, capture_output=True, text=True, env={**os.environ, **env})
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, links kept: building writes beside the sources, and would pack what an earlier build left there."""
    to = tmp_path_factory.mktemp("checkout")
    for name in ("fspeed", "ops", "shard"):
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    return to


@pytest.mark.parametrize("via_sdist", [False, True], ids=["checkout", "sdist"])
def test_wheel(via_sdist: bool, checkout: Path, tmp_path: Path) -> None:
    wanted = {
        Path(folder, file).relative_to(checkout).as_posix()
        for folder, _, files in os.walk(checkout / "fspeed", followlinks=True)
        for file in files
    }
    origin = checkout
    if via_sdist:
        origin = tmp_path / python("-c", SDIST, tmp_path, cwd=checkout).split()[-1]
    python("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, origin, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")

    with zipfile.ZipFile(wheel) as archive:
        packed = {info.filename: info for info in archive.infolist() if ".dist-info/" not in info.filename}
        assert set(packed) == wanted
        assert {"fspeed/ops/__init__.py", "fspeed/shard/__init__.py", "fspeed/py.typed"} <= wanted
        assert not [name for name, info in packed.items() if (info.external_attr >> 16) & 0o170000 == 0o120000], "links"
        assert any(name.endswith("dist-info/licenses/LICENSE") for name in archive.namelist())

    target, empty = tmp_path / "target", tmp_path / "empty"
    empty.mkdir()
    python("-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel, cwd=empty)
    python("-W", "error", "-c", SMOKE, target, cwd=empty, PYTHONPATH=str(target))
    if (quickstart := ROOT / "examples/quickstart.py").exists():
        python(shutil.copy(quickstart, empty), cwd=empty, PYTHONPATH=str(target))
