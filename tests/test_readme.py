"""What the documents show is true: their Python runs, and the files and flags that their commands name exist.

The Python blocks of one document run in order in one process, as a reader would type them. A block that cannot run on its own opens
with ```python skip. The README's two install commands are run by .ci/run, which takes them from the README.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TOOLS = {re.split(r"[^\w-]", requirement)[0] for extra in EXTRAS.values() for requirement in extra}  # an extra may bring them
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: Path, *languages: str) -> list[tuple[int, str]]:
    """(number of its first line, text) of each fenced block in one of these languages, without those marked `skip`."""
    text = document.read_text()
    found = [m for m in BLOCK.finditer(text) if m[1] in languages and "skip" not in m[2]]
    return [(text.count("\n", 0, m.start(3)) + 1, m[3]) for m in found]


def commands(document: Path) -> list[list[str]]:
    """The words of each shell command; `a && b` are two."""
    text = "\n".join(text for _, text in blocks(document, "sh", "bash", "shell", "console")).replace("\\\n", " ")
    found = [shlex.split(part.removeprefix("$ "), comments=True) for part in re.split(r"\n|&&|;|\|", text)]
    return [words for words in found if words and words[0] not in ("cd", "export", "source")]


def having(what: list[object]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("document", what, ids=lambda d: d.relative_to(ROOT).as_posix())


@having([d for d in DOCUMENTS if blocks(d, "python")])
def test_python_blocks_run(document: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    for first, text in blocks(document, "python"):
        lines += [""] * (first - 1 - len(lines)) + text.splitlines()  # a traceback then names the document's own line
    script = tmp_path / f"{document.stem}.py"
    script.write_text("\n".join(lines))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    ran = subprocess.run([sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert ran.returncode == 0, f"\n{ran.stderr}"


@having([d for d in DOCUMENTS if commands(d)])
def test_commands_name_what_exists(document: Path) -> None:
    assert not [thing for words in commands(document) for thing in missing(words)]


def missing(words: list[str]) -> list[str]:
    """What a command names that is not there: the program, a file, a module to run, an extra, a flag of an example."""
    programs = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    files = [word for word in words if re.fullmatch(r"[\w./-]+\.(py|txt|sh|toml)|(\./)?\.ci/run", word)]
    absent = [file for file in files if not (ROOT / file).exists()]
    if words[0] not in files and words[0] not in TOOLS and not shutil.which(words[0], path=programs):
        absent.append(words[0])
    if words[:2] == ["python", "-m"] and not find_spec(words[2]):
        absent.append(f"module {words[2]}")
    for word in words:
        if extras := re.fullmatch(r"\.\[(.+)\]", word):
            absent += [f"extra {extra}" for extra in extras[1].split(",") if extra not in EXTRAS]
    if not absent and (scripts := [file for file in files if file.startswith("examples/")]):
        flags = [word.split("=")[0] for word in words[words.index(scripts[0]) :] if word.startswith("--")]
        absent += [f"{scripts[0]} {flag}" for flag in flags if flag not in taught(scripts[0])]
    return absent


@cache
def taught(script: str) -> set[str]:
    """The flags that a script's --help names."""
    ran = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"--[\w-]+", ran.stdout))
