"""The pool of ranks: what goes to them and comes back, and that nothing hangs, leaks or stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fspeed.testing.pool import Pool, RankError, mesh, ranks

ROOT = Path(__file__).parents[1]


def test_results_come_by_rank() -> None:
    assert ranks(3)(dist.get_rank) == [0, 1, 2]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_pools_of_all_sizes_live_side_by_side(n: int) -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    before = torch.ones(2)
    assert all(torch.equal(y, torch.full((2,), float(n))) for y in ranks(n)(total, before))
    assert torch.equal(before, torch.ones(2))
    assert ranks(n)(os.getpid) == ranks(n)(os.getpid)


def test_closures_lambdas_and_torch_ops_travel() -> None:
    k = 3
    double = lambda x: torch.ops.aten.mul(x, k - 1)
    assert ranks(2)(lambda x: double(x).item() + dist.get_rank(), torch.tensor(5)) == [10, 11]


def test_a_rank_has_one_thread() -> None:
    assert ranks(2)(torch.get_num_threads) == [1, 1]


def test_a_mesh_is_made_once() -> None:
    groups = lambda: (mesh(a=2, b=2).axis("a").group, len(dist.distributed_c10d._world.pg_map))
    ranks(4)(groups)
    assert ranks(4)(groups) == ranks(4)(groups)


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no")


def fail(error: Exception | None) -> None:
    if dist.get_rank() == 1:
        raise error or Unpicklable("so it is")
    dist.barrier()  # would wait for rank 1 forever


def test_an_error_comes_with_its_rank_and_traceback_and_frees_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1: (?s:.*)in fail(?s:.*)KeyError: 'lost'") as raised:
        ranks(2)(fail, KeyError("lost"))
    assert raised.value.rank == 1
    assert isinstance(raised.value.__cause__, KeyError)
    assert ranks(2)(dist.get_rank) == [0, 1]
    assert time.monotonic() - start < 30  # not the pool's timeout


def test_an_error_that_does_not_pickle_comes_as_text() -> None:
    with pytest.raises(RankError, match="Unpicklable: so it is"):
        ranks(2)(fail, None)


def test_a_result_that_does_not_pickle_is_an_error() -> None:
    with pytest.raises(RankError, match="cannot pickle"):
        ranks(1)(lambda: dist.group.WORLD)


def test_a_rank_that_dies_is_an_error() -> None:
    with pytest.raises(RankError, match="rank 1: it died"):
        ranks(2)(lambda: os._exit(3) if dist.get_rank() == 1 else dist.barrier())
    with Pool(2) as two:
        (_, pid) = two(os.getpid)
        os.kill(pid, signal.SIGKILL)  # between two calls
        with pytest.raises(RankError, match="rank 1: it died"):
            two(os.getpid)
        assert two(dist.get_rank) == [0, 1]


def test_a_call_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(TimeoutError, match=r"no answer in 0.2 s from ranks \[1\] of 2"):
        ranks(2)(lambda: time.sleep(60 * dist.get_rank()), timeout=0.2)
    assert ranks(2)(dist.get_rank) == [0, 1]


def test_different_numbers_of_calls_are_an_error_though_nothing_hangs() -> None:
    def one_more() -> None:
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1), async_op=True)

    with pytest.raises(RuntimeError, match="the ranks made different collective calls"):
        ranks(2)(one_more)
    assert ranks(2)(dist.get_rank) == [0, 1]


def test_sends_are_not_collectives() -> None:
    def send() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1)
        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), 0)

    before = ranks(3)(os.getpid)
    ranks(3)(send)
    assert ranks(3)(os.getpid) == before


def test_a_missing_cloudpickle_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match=r"pip install 'fspeed\[test\]'"):
        ranks(1)(dist.get_rank)


SCRIPT = """
import os, signal, threading, time
from fspeed.testing.pool import ranks
print(*ranks(2)(os.getpid), flush=True)
try:
    ranks(2)(lambda: time.sleep(600), timeout=0.01)
except TimeoutError:
    print(*ranks(2)(os.getpid), flush=True)
{end}
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
KILLED_IN_A_CALL = f"threading.Timer(1, lambda: {KILLED}).start()\nranks(2)(lambda: time.sleep(600))"


@pytest.mark.parametrize("end", ["", KILLED, KILLED_IN_A_CALL])
def test_no_rank_outlives_its_caller(end: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", SCRIPT.format(end=end)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        said, complained = child.communicate(timeout=120)
    assert child.returncode == (-signal.SIGKILL if end else 0)
    assert complained == b""
    pids = [int(pid) for pid in said.split()]
    assert len(set(pids)) == 4
    deadline = time.monotonic() + 20
    while any(map(lives, pids)) or list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, (pids, list(tmp_path.iterdir()))
        time.sleep(0.02)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
