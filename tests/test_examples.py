"""Every example runs as its readers run it, and shows what it promises; train_gpt gives one answer however it is run."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
STEPS = 6
SHORT = ["--steps", str(STEPS), "--batch", "6", "--dropout", "0.1", "--json"]


def python(*words: object, cwd: Path = ROOT) -> str:
    """What a Python prints to its standard output."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def train(*options: object, ranks: int = 1, cwd: Path) -> dict:
    """The JSON that train_gpt.py prints last, of one process or of several."""
    launcher = [*TORCHRUN, ranks] if ranks > 1 else []
    printed = python(*launcher, ROOT / "examples" / "train_gpt.py", *options, cwd=cwd)
    assert (cwd / "train_gpt.png").read_bytes().startswith(b"\x89PNG")
    assert printed.count('"losses"') == printed.count("bigram model") == 1, "only rank 0 prints"
    shown = re.findall(r"^step +\d+  loss", printed, re.MULTILINE)
    assert shown and len(set(shown)) == len(shown), "only rank 0 shows its losses"
    return json.loads(printed.splitlines()[-1])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """A run in one process, and where it was saved."""
    folder = tmp_path_factory.mktemp("one")
    return train(*SHORT, "--save", "saved", cwd=folder), folder


def test_quickstart_is_the_readme_s_first_block_and_learns() -> None:
    code = (ROOT / "examples" / "quickstart.py").read_text()
    head = "\n".join((ROOT / "README.md").read_text().splitlines()[:30])
    assert re.search(r"^```python\n(.*?)^```$", head, re.MULTILINE | re.DOTALL)[1] == code
    first, *_, last = losses(python("-W", "error", "examples/quickstart.py"))
    assert last < first / 20


def test_meta_learning_finds_a_better_learning_rate() -> None:
    found = losses(python("-W", "error", "examples/meta_learning.py"))
    assert found == sorted(found, reverse=True) and found[-1] < found[0] / 2


def test_custom_transform_is_proved_and_of_use() -> None:
    params, average = map(float, re.findall(r"off by ([\d.]+)", python("-W", "error", "examples/custom_transform.py")))
    assert average < params


def test_custom_op_is_proved_and_learns() -> None:
    pytest.importorskip("triton")
    printed = python("-W", "error", "-W", "ignore::DeprecationWarning", "examples/custom_op.py")
    assert "second derivatives tensor([ 0.0000" in printed.replace("-0.", " 0.") and "torch.Size([64, 8])" in printed
    first, *_, last = losses(printed)
    assert last < first / 20


def test_train_gpt_begins_at_chance_and_learns(one) -> None:
    run, _ = one
    assert len(run["losses"]) == STEPS
    assert abs(run["losses"][0] - math.log(256)) < 0.2
    assert run["heldout"] < run["losses"][0] - 0.5
    assert 2 < run["bigram"] < 3 and run["tokens_per_s"] > 0


@pytest.mark.parametrize(
    "options", ["--zero 0 --accumulate 2", "--zero 1 --checkpoint", "--zero 2", "--zero 3 --accumulate 2 --checkpoint"]
)
def test_train_gpt_gives_one_answer_on_two_ranks(one, options: str, tmp_path: Path) -> None:
    run = train(*SHORT, *options.split(), ranks=2, cwd=tmp_path)
    assert run["losses"] == pytest.approx(one[0]["losses"], rel=1e-5)
    assert run["heldout"] == pytest.approx(one[0]["heldout"], rel=1e-5)


def test_train_gpt_resumes_as_if_uninterrupted(one, tmp_path: Path) -> None:
    run, folder = one
    shutil.copytree(folder / "saved", tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved" / f"step-{STEPS}")
    resumed = train(*SHORT, "--save", "saved", "--resume", cwd=tmp_path)
    assert resumed["losses"] == run["losses"][-1:]
    assert resumed["heldout"] == run["heldout"]


def test_train_gpt_runs_as_the_readme_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    ranks, options = re.search(r"^torchrun --nproc-per-node (\d) examples/train_gpt.py (.*)$", readme, re.MULTILINE).groups()
    run = train("--steps", 2, "--json", *options.split(), ranks=int(ranks), cwd=tmp_path)
    assert all(map(math.isfinite, run["losses"]))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_train_gpt_beats_a_bigram_model(tmp_path: Path) -> None:
    run = train("--json", cwd=tmp_path)
    assert run["heldout"] < run["bigram"] - 0.3


def losses(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([\d.]+)", re.sub(r" +", " ", printed))]
