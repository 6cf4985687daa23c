"""Checkpoints: a state on disk, complete or not there at all."""
import hashlib
import json
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fspeed.record import PLAIN, Record, difference, digest, parameters, paths, record
from fspeed.shard.pytree import tree_flatten, tree_leaves, tree_unflatten
from fspeed.step import State
from fspeed.together import on_rank_0, rank, together, world_size

FORMAT = 1
INDEX = "checkpoint.json"               # of the whole checkpoint: the last file to be written
UNFINISHED = re.compile(r"\.tmp-[0-9a-f]{8}$")


def save(path: str | os.PathLike, state: State) -> None:
    """Write a state to a new directory, which is there only when it is complete.

    Every rank calls it with the same path, on a file system that all share. The files are written and synced in a directory
    beside it, `path.tmp-...`, which then becomes `path` by one rename. Whatever fails or is killed before that leaves nothing
    at `path` and other checkpoints as they were; what a killed save leaves beside it is removed by the next save to `path`.

    Args:
        path: the directory to make; one that is there must be empty. `latest` finds the last of several:
            `fs.save(f"{runs}/step-{int(state.step)}", state)`.
        state: a step's state, under any stack of transforms. Its leaves are tensors, and numbers, strings and bools of Python.

    Raises:
        FileExistsError: something is at `path`.
        TypeError: what is given is no State, or has a leaf of another type.
        RuntimeError: the state was donated to a step.
        OSError: a file could not be written. What any rank raises, all do.

    Cost: each rank writes its own shards, and its part of what all ranks have; all of it is also read once, for SHA-256.

    Source: the files are those of `torch.distributed.checkpoint` and JSON.

    >>> import tempfile
    >>> from fspeed import optim
    >>> from fspeed.loss import mean
    >>> from fspeed.step import step
    >>> s = step(lambda p, batch, key: mean((p["w"] - batch) ** 2), optim.sgd(0.25))
    >>> state, _ = s(s.init({"w": torch.tensor(0.)}), torch.tensor([1., 3.]))
    >>> runs = tempfile.mkdtemp()
    >>> save(f"{runs}/step-1", state)
    >>> s.params(restore(latest(runs), s.init({"w": torch.tensor(0.)})))
    {'w': tensor(1.)}
    """
    from fspeed import dcp  # here: its import takes a second

    path = Path(path)
    document, tensors = together(lambda: described(state))
    aside = on_rank_0(lambda: begun(path))
    try:
        together(lambda: write(aside / f"rank-{rank()}.json", document))
        dcp.write_tensors(aside, tensors)
        index = {"format": FORMAT, "step": int(state.step), "world_size": world_size()}
        on_rank_0(lambda: publish(aside, path, {**index, "tensors": dcp.seal(aside)}))
    except BaseException:
        if rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def restore(path: str | os.PathLike, like: State) -> State:
    """The state that was saved: bitwise what it was, so that training goes on as if uninterrupted.

    Every rank calls it, as many as saved it, under the same stack of transforms. Structure, dtypes, shapes, placements, the
    world size and every byte are checked against what `save` recorded. No code from a checkpoint is run: the index of
    `torch.distributed.checkpoint` is a pickle, read here with an unpickler that makes that index's own records and nothing
    else, and tensors are read with `torch.load(weights_only=True)`. Torch's own `dcp.load` has no such guard.

    Args:
        path: what `save` wrote.
        like: a state of the same step, as `step.init(params)` makes it; its form and devices are used, and it stays as it is.

    Returns:
        A new State.

    Raises:
        FileNotFoundError: there is no complete checkpoint at `path`.
        ValueError: `like` differs from what was saved, with the leaf's path, or a file is damaged. What any rank raises, all do.
        TypeError: `like` is no State.

    Cost: one more state beside `like`; each rank reads its own part, and hashes it.

    >>> import tempfile
    >>> from fspeed import optim
    >>> from fspeed.step import step
    >>> s = step(lambda p, batch, key: None, optim.sgd(0.25))
    >>> path = f"{tempfile.mkdtemp()}/step-0"
    >>> save(path, s.init({"w": torch.ones(2)}))
    >>> s.params(restore(path, s.init({"w": torch.zeros(2)})))
    {'w': tensor([1., 1.])}
    """
    return together(lambda: restored(Path(path), like))


def latest(directory: str | os.PathLike) -> Path | None:
    """The complete checkpoint of the greatest `state.step` in a directory, or None; every rank calls it and gets rank 0's answer.

    Args:
        directory: where the directories that `save` made are; it need not be there. Unfinished ones do not count.

    Cost: one small file read a checkpoint.

    >>> import tempfile
    >>> runs = tempfile.mkdtemp()
    >>> if path := latest(runs):        # how a run goes on where it was, or starts
    ...     state = restore(path, state)
    """
    def find() -> Path | None:
        indices = [p for p in Path(directory).glob(f"*/{INDEX}") if not UNFINISHED.search(p.parent.name)]
        return max(indices, key=lambda p: (read(p)["step"], p.stat().st_mtime_ns)).parent if indices else None

    return on_rank_0(find)


# ---------------------------------------------------------------- what is written
def described(state: State) -> tuple[Record, dict[str, Tensor]]:
    """This rank's document and, by their keys, its tensors."""
    check_state("save", state)
    leaves: list[Any] = tree_leaves(cast(Any, state))
    if getattr(state.params, "written_over", False):
        raise RuntimeError("save: this state was donated to a step, which wrote over it; save the state that the step returned")
    form = form_of(state)
    rows = []
    for at, x in zip(paths(form["state"]), leaves, strict=True):
        if not isinstance(x, Tensor) and type(x) not in PLAIN:
            raise TypeError(
                f"save: leaf {at!r} of the state is a {type(x).__name__}; a leaf must be a torch.Tensor, or one of Python's "
                "bool, int, float and str: convert it, or keep it out of the state"
            )
        rows.append([at, digest(x) if isinstance(x, Tensor) else x])
    tensors = {key: x.detach() for key, x in zip(keys(rows), leaves, strict=True) if isinstance(x, Tensor)}
    return {**form, "leaves": rows}, tensors


def form_of(state: State) -> Record:
    """What is static of a state, after JSON, so that it compares with what was read."""
    return json.loads(json.dumps({"params": parameters(state.params), "state": record(state)}))


def keys(rows: list) -> Iterator[str]:
    """The names of leaves in the files, from [path, digest]: what several ranks have alike has one name, and is written once."""
    seen: Counter[str] = Counter()
    for at, value in rows:
        key = f"{at}@{value}"
        seen[key] += 1
        yield key if seen[key] == 1 else f"{key}#{seen[key]}"      # dict keys with "/" can give two leaves one path


def check_state(who: str, state: Any) -> None:
    if not isinstance(state, State):
        raise TypeError(f"{who}: expected a State, as step.init(params) makes it; got a {type(state).__name__}")


def begun(path: Path) -> Path:
    """A new directory beside path, and nothing that earlier saves to path left there."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"save: {path} is there already; give every checkpoint a path of its own, such as runs/step-100")
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.iterdir():
        if UNFINISHED.sub("", old.name) == path.name != old.name:
            shutil.rmtree(old)
    aside = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    aside.mkdir()
    return aside


def publish(aside: Path, path: Path, index: Record) -> None:
    """Let a directory, complete but for its index, be at path."""
    write(aside / INDEX, index)
    sync_directory(aside)
    aside.rename(path)
    sync_directory(path.parent)


def write(path: Path, document: Any) -> None:
    """A JSON document and its digest, on disk."""
    text = json.dumps(document).encode()
    with path.open("wb") as file:
        file.write(text + b"\n" + hashlib.sha256(text).hexdigest().encode())
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---------------------------------------------------------------- what is read
def restored(path: Path, like: State) -> State:
    """This rank's part of a saved state."""
    from fspeed import dcp

    check_state("restore", like)
    index = read_index(path)
    document = read(path / f"rank-{rank()}.json")
    refuse_difference(path, document, form_of(like))
    leaves, spec = tree_flatten(cast(Any, like))
    rows = document["leaves"]
    names = [key if isinstance(x, Tensor) else None for key, x in zip(keys(rows), leaves, strict=True)]
    tensors = {key: torch.empty_like(x, requires_grad=False) for key, x in zip(names, leaves, strict=True) if key}
    try:
        dcp.read_tensors(path, tensors, index["tensors"])
    except Exception as error:
        raise damaged(path, str(error)) from error
    for key, (at, value) in zip(names, rows, strict=True):
        if key and digest(tensors[key]) != value:
            raise damaged(path, f"leaf {at!r} is not what was saved")
    found = [tensors[key] if key else value for key, (_, value) in zip(names, rows, strict=True)]
    return cast(State, tree_unflatten(spec, found))


def read_index(path: Path) -> Record:
    """What holds for a whole checkpoint, if this run can restore it."""
    if not (path / INDEX).is_file():
        inside = path.is_dir() and any(path.glob(f"*/{INDEX}"))
        what = f"fs.latest({str(path)!r}) is the last of those in it" if inside else "fs.save makes one"
        raise FileNotFoundError(f"restore: {path} is no complete checkpoint; {what}")
    index = read(path / INDEX)
    if index["format"] != FORMAT:
        raise ValueError(f"restore: {path} has format {index['format']}, this fspeed reads {FORMAT}; use the version that saved it")
    if index["world_size"] != world_size():
        raise ValueError(
            f"restore: {path} was saved by {index['world_size']} ranks, this run has {world_size()}; each rank's shards are its "
            f"own: run on {index['world_size']}"
        )
    return index


def refuse_difference(path: Path, saved: Record, here: Record) -> None:
    """Raise if a state of the form `here` is not what was saved."""
    for part in ("params", "state"):
        found = difference(saved[part], here[part], part)
        if found:
            at, what, *both = found
            a, b = ("nothing" if x is None else x for x in both)
            advice = ADVICE.get(what, "restore needs a state of the same model, optimizer and transforms, from step.init")
            raise ValueError(f"restore: {at.removeprefix('state/')} {what}: {a} in {path}, {b} in `like`; {advice}")


ADVICE = {
    "transforms": "build the step with the transforms that saved it, in their order",
    "axes": "make the mesh with the axes that saved it",
    "axis": "make the mesh with the axes that saved it",
}


def read(path: Path) -> Any:
    """What `write` wrote."""
    try:
        text, _, seal = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError as error:
        raise damaged(path.parent, f"{path.name} is missing") from error
    if hashlib.sha256(text).hexdigest().encode() != seal:
        raise damaged(path.parent, f"{path.name} is not what was written")
    return json.loads(text)


def damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"restore: {path} is damaged: {why}; restore an earlier checkpoint")
