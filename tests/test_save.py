"""A state on disk: bitwise what it was, or a clear error; complete or not there, whatever fails or is killed at whatever write.

Numbers in brackets name the public bug reports whose property a test holds.
"""
import io
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from fspeed import dcp, optim, random
from fspeed.record import digest
from fspeed.save import INDEX, latest, read, restore, save, write
from fspeed.shard.mesh import Mesh
from fspeed.shard.pytree import tree_leaves, tree_map, tree_paths, tree_structure
from fspeed.step import State, Step
from fspeed.step import step as make_step
from fspeed.testing.pool import Pool, RankError, mesh, ranks
from fspeed.testing.problem import problem
from fspeed.testing.stacks import data_parallel, donate, mixed_precision, stacked, stacks, zero_shard
from fspeed.testing.trees import tensors, trees
from fspeed.tree import whole

ROWS = 6


class HeavyBallState(NamedTuple):
    count: torch.Tensor
    mu: Any
    name: str
    decay: float
    nothing: None = None


class HeavyBall(NamedTuple):
    """Momentum under a schedule, with a state of everything: a count, moments, Python's own values, None."""
    rate: float = 0.5

    def init(self, params: Any) -> HeavyBallState:
        return HeavyBallState(torch.zeros((), dtype=torch.int32), tree_map(torch.zeros_like, params), "heavy ball", 0.9)

    def update(self, grads: Any, state: HeavyBallState, params: Any = None) -> tuple[Any, HeavyBallState]:
        mu = tree_map(lambda g, m: g + state.decay * m, grads, state.mu)
        rate = self.rate / (1 + state.count)
        return tree_map(lambda m: (-rate * m).to(m.dtype), mu), state._replace(count=state.count + 1, mu=mu)


def built(names: tuple[str, ...] = (), **changes: Any) -> Step:
    p = problem()
    return stacked(make_step(p.loss, HeavyBall(), layers=p.layers, trainable=p.trainable), names, mesh(data=dist.get_world_size()))


def run(step: Step, state: State, first: int, steps: int) -> tuple[State, list]:
    """Some steps on this rank's rows."""
    n, r, found = dist.get_world_size(), dist.get_rank(), []
    for i in range(first, first + steps):
        state, metrics = step(state, tree_map(lambda x: x.tensor_split(n)[r], problem().batch(i, ROWS)))
        found.append(metrics)
    return state, found


def bits(tree: Any) -> list:
    return [digest(x) if isinstance(x, torch.Tensor) else (type(x), repr(x)) for x in tree_leaves(tree)]


def assert_same(got: Any, expected: Any) -> None:
    assert tree_structure(got) == tree_structure(expected)
    for path, a, b in zip(tree_paths(expected), bits(got), bits(expected), strict=True):
        assert a == b, path


# ---------------------------------------------------------------- what was saved comes back, and training goes on [12, 13, 33, 47]
def resumed(names: tuple[str, ...], folder: str) -> None:
    step = built(names)
    state, _ = run(step, step.init(problem().params, random.key(1)), 0, 3)
    save(f"{folder}/x", state)
    like = step.init(problem(seed=5).params, random.key(7))
    before = bits(like)
    got = restore(f"{folder}/x", like)
    assert_same(got, state)
    assert bits(like) == before and not memory(got) & memory(like)
    params = step.params(got)
    assert torch.equal(params["wte"], params["head"])
    assert torch.equal(params["blocks"][0]["frozen"], problem().params["blocks"][0]["frozen"])
    uninterrupted, metrics = run(step, state, 3, 3)
    went_on, others = run(step, got, 3, 3)
    assert_same(went_on, uninterrupted)
    assert_same(others, metrics)
    assert went_on.opt_state.count == 6 or "fp16" in names


def memory(tree: Any) -> set[int]:
    return {x.data_ptr() for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.numel()}


FIXED = [(), ("zero1",), ("zero2", "accumulate"), ("fp16", "zero3"), ("zero3", "bf16", "checkpoint"), ("data_parallel", "fp16")]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("names", FIXED)
def test_training_goes_on(names: tuple[str, ...], n: int, tmp_path: Path) -> None:
    if names or n == 1:
        ranks(n)(resumed, names, str(tmp_path))


@settings(max_examples=5)
@given(stacks(2).filter(lambda names: "donate" not in names))
def test_training_goes_on_under_any_stack(names: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks(2)(resumed, names, folder)


# ---------------------------------------------------------------- any tree [17, 20, 21, 22]
scalars = st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.none())
drawn = trees(st.one_of(tensors(), scalars))


def bare(**fields: Any) -> State:
    return make_step(lambda p, batch, key: None, HeavyBall()).init({"w": torch.ones(3)})._replace(**fields)


@settings(max_examples=60)
@given(drawn, drawn)
def test_any_tree_comes_back(opt_state: Any, buffers: Any) -> None:
    blank = lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else type(x)()
    state = bare(opt_state=opt_state, buffers=buffers)
    with tempfile.TemporaryDirectory() as folder:
        save(f"{folder}/x", state)
        got = restore(f"{folder}/x", tree_map(blank, state))
    assert_same(got, state)
    assert [type(x) for x in tree_leaves(got)] == [type(x) for x in tree_leaves(state)]


def test_leaves_of_one_path_do_not_become_one(tmp_path: Path) -> None:
    state = bare(buffers={"a/b": torch.zeros(3), "a": {"b": torch.zeros(3)}})
    save(tmp_path / "x", state)
    got = restore(tmp_path / "x", state)
    assert_same(got, state)
    got.buffers["a/b"].fill_(1)
    assert not got.buffers["a"]["b"].any()


def test_what_a_rank_alone_has_comes_back_to_it(tmp_path: Path) -> None:
    def law() -> bool:
        rank = dist.get_rank()
        own = {"same": torch.arange(5), "own": torch.full((4,), rank), "shape": torch.ones(rank + 1), "who": rank}
        save(tmp_path / "x", bare(buffers=own))
        assert_same(restore(tmp_path / "x", bare(buffers=tree_map(lambda x: x * 0, own))).buffers, own)
        return True

    assert all(ranks(2)(law))


def test_what_ranks_have_alike_is_written_once(tmp_path: Path) -> None:
    def law() -> None:
        step = data_parallel(make_step(lambda p, b, k: None, HeavyBall()), mesh(data=dist.get_world_size()))
        save(tmp_path / str(dist.get_world_size()), step.init({"w": torch.arange(50_000.)}))

    ranks(1)(law), ranks(2)(law)
    size = lambda n: sum(file.stat().st_size for file in (tmp_path / str(n)).glob("*.distcp"))
    assert size(2) < size(1) + 5_000


# ---------------------------------------------------------------- whatever fails, at whatever write [34]
def test_all_is_on_disk_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, rename, synced = os.fsync, Path.rename, []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name) or fsync(fd))
    monkeypatch.setattr(Path, "rename", lambda path, to: synced.append(f"{path.name} -> {to.name}") or rename(path, to))
    save(tmp_path / "x", bare())
    aside, last = synced[-3], synced[-2:]
    assert last == [f"{aside} -> x", tmp_path.name]
    assert {".metadata.tmp", "__0_0.distcp", "checkpoint.json", "rank-0.json"} < set(synced[:-3])


class Fault:
    """Does something at the k-th time that this process touches a file: opens one to write, makes, renames, removes or syncs."""

    def __init__(self, k: int, do: Callable[[], None]):
        self.left, self.do = k, do
        fsync, self.fsync = os.fsync, os.fsync
        os.fsync = lambda fd: (self.touched(), fsync(fd))[1]
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple) -> None:
        writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
        if self.left and (writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")):
            self.touched()

    def touched(self) -> None:
        if self.left:
            self.left -= 1
            if not self.left:
                self.do()

    def over(self) -> bool:
        """Whether it was never reached."""
        left, self.left, os.fsync = self.left, 0, self.fsync
        return left > 0


def fail() -> None:
    raise OSError("the disk is full")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sharded() -> Step:
    return built(("zero3",) if dist.get_world_size() > 1 else ())


def save_with_fault(folder: str, at: int, k: int, do: Callable[[], None]) -> bool:
    """Save step 2 with a fault on one rank; whether it went through on all, and all agree."""
    state = sharded().init(problem().params)._replace(step=torch.tensor(2))
    fault = Fault(k if dist.get_rank() == at else 0, do)
    try:
        save(f"{folder}/b", state)
        failed = False
    except OSError as error:
        failed = "the disk is full" in str(error)
        assert failed
    return fault.over() if dist.get_rank() == at else not failed


def check_previous(folder: str, step: int) -> None:
    """The last checkpoint is there, whole, and can be followed by another."""
    s = sharded()
    like = s.init(problem(seed=3).params)
    path = latest(folder)
    assert path is not None and restore(path, like).step == step
    assert_same(s.params(restore(path, like)), s.params(s.init(problem().params)))


def prepare(folder: str) -> None:
    save(f"{folder}/a", sharded().init(problem().params)._replace(step=torch.tensor(1)))


@pytest.mark.parametrize("n, at", [(1, 0), (2, 0), (2, 1)])
def test_a_failing_write_leaves_the_checkpoint_before(n: int, at: int, tmp_path: Path) -> None:
    pool, folder = ranks(n), str(tmp_path)
    pool(prepare, folder)
    for k in range(1, 99):
        if all(pool(save_with_fault, folder, at, k, fail)):
            break
        published = (tmp_path / "b").exists()       # some faults do no harm: making a directory that is there, the last sync
        assert sorted(os.listdir(folder)) == (["a", "b"] if published else ["a"])
        pool(check_previous, folder, 2 if published else 1)
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
    assert 5 < k < 50
    pool(check_previous, folder, 2)


def killed(folder: str, k: int) -> bool:
    """Whether a child of this process was killed as it saved."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (child := os.fork()):
        save_with_fault(folder, 0, k, die)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_killed_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    pool, folder = ranks(1), str(tmp_path)
    pool(prepare, folder)
    for k in range(1, 99):
        if not all(pool(killed, folder, k)):
            break
        published = (tmp_path / "b").exists()
        pool(check_previous, folder, 2 if published else 1)
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
    assert 10 < k < 50
    pool(check_previous, folder, 2)
    assert sorted(os.listdir(folder)) == ["a", "b"]     # each save removed what the one before left


@pytest.mark.parametrize("at", [0, 1])
def test_a_killed_rank_leaves_the_checkpoint_before(at: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks(2)(prepare, folder)
    with Pool(2) as pool, pytest.raises(RankError, match=r"died|Connection"):
        pool(save_with_fault, folder, at, 4, die)
    ranks(2)(check_previous, folder, 1)
    assert len(os.listdir(folder)) in (1, 2)         # the rank that made the partial folder may have ended before it did
    assert all(ranks(2)(save_with_fault, folder, at, 99, die))
    ranks(2)(check_previous, folder, 2)
    assert sorted(os.listdir(folder)) == ["a", "b"]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    def law(limit: int) -> str:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            save(tmp_path / "b", built().init(problem().params)._replace(step=torch.tensor(2)))
            return "saved"
        except Exception as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    ranks(1)(prepare, str(tmp_path))
    for limit in (0, 100, 1_000, 5_000, 20_000):
        said = ranks(1)(law, limit)[0]
        assert "large" in said or "fail" in said, said
        assert os.listdir(tmp_path) == ["a"]
        ranks(1)(check_previous, str(tmp_path), 1)
    assert ranks(1)(law, 1_000_000) == ["saved"]


def test_one_rank_that_cannot_save_stops_all(tmp_path: Path) -> None:
    def law() -> str:
        with pytest.raises(TypeError, match="leaf 'buffers/f' of the state is a function") as caught:
            save(tmp_path / "x", bare(buffers={"f": law if dist.get_rank() else 1}))
        return str(caught.value)

    assert len(set(ranks(2)(law))) == 1
    assert not os.listdir(tmp_path)


# ---------------------------------------------------------------- what does not fit is refused, with a word on what to do
LOSS = lambda params, batch, key: None
PARAMS = {"w": torch.ones(4, 6), "blocks": [{"w": torch.ones(3)}, {"w": torch.ones(3)}]}


def bf16(params: Any) -> Any:
    return tree_map(lambda x: x.bfloat16(), params)


class Other(HeavyBall):
    def init(self, params: Any) -> Any:
        return (torch.zeros((), dtype=torch.int32),)


class Whole(HeavyBall):
    def init(self, params: Any) -> Any:
        return super().init(params)._replace(decay=1)


class Wide(HeavyBall):
    def init(self, params: Any) -> Any:
        return super().init(params)._replace(count=torch.zeros((), dtype=torch.int64))


MISFITS = {
    "shape": (lambda s: s(PARAMS | {"w": torch.ones(6, 4)}), ["params leaves w", "[4, 6]", "[6, 4]", "step.init"]),
    "same bytes": (lambda s: s(PARAMS | {"w": torch.ones(24)}), ["params leaves w", "[4, 6]", "[24]"]),
    "dtype": (lambda s: s(bf16(PARAMS)), ["params leaves w", "float32", "bfloat16"]),
    "one more": (lambda s: s(PARAMS | {"v": torch.ones(1)}), ["params leaves v", "nothing in", "float32 [1]"]),
    "one less": (lambda s: s(PARAMS | {"blocks": PARAMS["blocks"][:1]}), ["params leaves blocks/1/w", "nothing in `like`"]),
    "a tuple": (lambda s: s(PARAMS | {"blocks": tuple(PARAMS["blocks"])}), ["params tree/blocks is", "list", "tuple"]),
    "frozen": (lambda s: s(trainable="w"), ["params leaves blocks/0/w", "frozen"]),
    "layers": (lambda s: s(layers=()), ["params leaves blocks/0/w", "in blocks/0", "in root"]),
    "optimizer": (lambda s: s(optimizer=Other()), ["opt_state is", "HeavyBallState", "tuple"]),
    "a number's type": (lambda s: s(optimizer=Whole()), ["opt_state/decay is", "float in", "int in `like`"]),
    "count's dtype": (lambda s: s(optimizer=Wide()), ["opt_state/count is", "int32", "int64"]),
    "transforms": (lambda s: s(wrap=lambda x, m: x), ["params transforms", "flat shards over 'data'", "[]", "build the step with"]),
    "order": (lambda s: s(wrap=lambda x, m: zero_shard(mixed_precision(x), m)), ["params transforms", "float32 masters"]),
    "axis": (lambda s: s(axis="rows"), ["params transforms", "'data'", "'rows'"]),
    "extra": (lambda s: s(wrap=lambda x, m: mixed_precision(zero_shard(x, m), torch.float16)), ["extra", "loss_scale"]),
}


def sharded_in_bf16(step: Step, mesh: Mesh) -> Step:
    return mixed_precision(zero_shard(step, mesh, axis=mesh.axes[0].name))


def init(
    params: Any = PARAMS, *, layers: Any = "blocks/*", trainable: Any = "**", optimizer: Any = None, axis: str = "data",
    wrap: Callable[[Step, Mesh], Step] = sharded_in_bf16,
) -> State:
    step = make_step(LOSS, optimizer or HeavyBall(), layers=layers, trainable=trainable)
    return wrap(step, mesh(**{axis: dist.get_world_size()})).init(params)


def refused(folder: str, name: str) -> str:
    with pytest.raises(ValueError, match="restore: ") as caught:
        restore(f"{folder}/x", MISFITS[name][0](init))
    return str(caught.value)


@pytest.mark.parametrize("name", MISFITS)
def test_a_misfit_is_refused(name: str, tmp_path: Path) -> None:
    ranks(2)(lambda folder: save(f"{folder}/x", init()), str(tmp_path))
    for said in ranks(2)(refused, str(tmp_path), name):
        for part in (*MISFITS[name][1], f"{tmp_path}/x"):
            assert part in said, said


def test_another_world_size_is_refused(tmp_path: Path) -> None:
    ranks(2)(lambda: save(tmp_path / "x", init()))

    def law() -> None:
        with pytest.raises(ValueError, match=r"was saved by 2 ranks, this run has 1; .* run on 2"):
            restore(tmp_path / "x", init())

    ranks(1)(law)


def test_other_paths_and_other_things_are_refused(tmp_path: Path) -> None:
    state = bare()
    save(tmp_path / "runs/x", state)
    with pytest.raises(FileExistsError, match=r"runs/x is there already; give every checkpoint a path of its own"):
        save(tmp_path / "runs/x", state)
    with pytest.raises(FileNotFoundError, match=r"runs is no complete checkpoint; fs.latest\('.*runs'\)"):
        restore(tmp_path / "runs", state)
    with pytest.raises(FileNotFoundError, match=r"y is no complete checkpoint; fs.save makes one"):
        restore(tmp_path / "y", state)
    with pytest.raises(TypeError, match=r"restore: expected a State, as step.init.* makes it; got a dict"):
        restore(tmp_path / "runs/x", whole(state.params))
    with pytest.raises(TypeError, match="save: expected a State"):
        save(tmp_path / "z", whole(state.params))
    write(tmp_path / "runs/x" / INDEX, read(tmp_path / "runs/x" / INDEX) | {"format": 99})
    with pytest.raises(ValueError, match="has format 99, this fspeed reads 1"):
        restore(tmp_path / "runs/x", state)


def test_a_donated_state_is_refused(tmp_path: Path) -> None:
    def law() -> None:
        p = problem()
        step = donate(make_step(p.loss, optim.sgd(0.5), layers=p.layers))
        state = step.init(p.params)
        new, _ = run(step, state, 0, 1)
        with pytest.raises(RuntimeError, match="save: this state was donated"):
            save(tmp_path / "x", state)
        save(tmp_path / "x", new)

    ranks(1)(law)


def test_latest_is_of_the_greatest_step(tmp_path: Path) -> None:
    assert latest(tmp_path / "nothing") is None and latest(tmp_path) is None
    for name, step in {"step-9": 9, "step-10": 10, "z": 2}.items():
        save(tmp_path / name, bare(step=torch.tensor(step)))
    (tmp_path / "step-10").rename(tmp_path / "step-11")
    (tmp_path / "step-12").mkdir()
    save(tmp_path / "step-13", bare(step=torch.tensor(13)))
    (tmp_path / "step-13").rename(tmp_path / "step-13.tmp-0123abcd")        # killed just before the rename
    assert latest(tmp_path) == tmp_path / "step-11"
    assert ranks(2)(lambda: latest(tmp_path)) == [tmp_path / "step-11"] * 2
    save(tmp_path / "step-13", bare())
    assert not list(tmp_path.glob("*.tmp-*"))


# ---------------------------------------------------------------- damage
def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_truncated_or_missing_file_is_refused(tmp_path: Path) -> None:
    state = bare()
    save(tmp_path / "x", state)
    for name, text in files(tmp_path / "x").items():
        for length in [None, *range(0, len(text), max(1, len(text) // 7)), len(text) - 1]:
            file = tmp_path / "x" / name
            file.unlink() if length is None else file.write_bytes(text[:length])
            says = rf"{tmp_path}/x is (damaged: .*{name}.*; restore an earlier|no complete checkpoint)"
            with pytest.raises((ValueError, FileNotFoundError), match=says):
                restore(tmp_path / "x", state)
            file.write_bytes(text)
    assert_same(restore(tmp_path / "x", state), state)


def test_a_flipped_bit_is_refused_or_means_nothing(tmp_path: Path) -> None:
    state = bare(buffers={"x": torch.randn(40), "n": 3})
    save(tmp_path / "x", state)
    refused = 0
    for name, text in files(tmp_path / "x").items():
        for at in range(3, len(text), 47):
            (tmp_path / "x" / name).write_bytes(text[:at] + bytes([text[at] ^ 1 << at % 8]) + text[at + 1:])
            try:
                assert_same(restore(tmp_path / "x", state), state)      # zip files have bytes that nobody reads
            except ValueError as error:
                refused += 1
                assert f"{tmp_path}/x is damaged" in str(error), error
                continue
            assert name.endswith(".distcp")
        (tmp_path / "x" / name).write_bytes(text)
    assert refused > 50


def test_a_flipped_number_names_its_leaf(tmp_path: Path) -> None:
    state = bare(buffers={"x": torch.full((9,), 1.2345)})
    save(tmp_path / "x", state)
    file = tmp_path / "x/__0_0.distcp"
    number = torch.tensor(1.2345).numpy().tobytes()
    file.write_bytes(file.read_bytes().replace(number, b"abcd", 1))
    with pytest.raises(ValueError, match="leaf 'buffers/x' is not what was saved"):
        restore(tmp_path / "x", state)


def test_no_code_is_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    def sealed(index: Any) -> None:
        """An index by somebody who knows the seals."""
        (tmp_path / "x" / dcp.INDEX).write_bytes(pickle.dumps(index))
        write(tmp_path / "x" / INDEX, read(tmp_path / "x" / INDEX) | {"tensors": dcp.seal(tmp_path / "x")})

    state = bare()
    save(tmp_path / "x", state)
    index = dcp.Unpickler(io.BytesIO((tmp_path / "x" / dcp.INDEX).read_bytes())).load()
    sealed(Evil())
    with pytest.raises(ValueError, match=r"names [\w.]+, which no checkpoint of tensors does; do not trust it"):
        restore(tmp_path / "x", state)
    index.state_dict_metadata[next(iter(index.state_dict_metadata))] = BytesStorageMetadata()
    sealed(index)
    with pytest.raises(ValueError, match=r"names .*BytesStorageMetadata, which no checkpoint"):
        restore(tmp_path / "x", state)
    assert not (tmp_path / "ran").exists()


def test_the_record_is_enough_to_put_shards_together(tmp_path: Path) -> None:
    """What is written says where every element of every leaf lies, for a reader of another world size."""
    ranks(2)(lambda: save(tmp_path / "x", built(("zero3",)).init(problem().params)))
    told = json.loads((tmp_path / "x/rank-1.json").read_bytes().rpartition(b"\n")[0])
    params = dict(dict(told["state"]["children"])["params"]["children"])
    layout = params["blocks/0"]["layout"]
    assert params["blocks/0"]["axis"] == {"name": "data", "size": 2, "rank": 1, "splits_batch": True}
    assert [key for key, _ in layout["group"]["children"]] == ["b", "frozen", "rare", "w"]
    assert layout["buffer"] == [0, 1, 0, 0]
    assert layout["buffers"] == [["float32", False, 45], ["float32", True, 6]]
    assert told["params"]["leaves"]["blocks/0/w"] == "float32 [6, 6] in blocks/0"
