"""A persistent pool of gloo ranks on this machine, so that a property over many ranks is a function call of a millisecond.

A zygote process imports torch once and forks the ranks, so starting one, or starting again after a failure, takes milliseconds.
When the caller goes, even by SIGKILL, its socket to the zygote closes, and the zygote ends the ranks and itself.
"""

import atexit
import contextlib
import copyreg
import datetime
import faulthandler
import functools
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from fspeed.shard.mesh import Mesh
from fspeed.shard.mesh import mesh as make_mesh

# functions that travel by value may name torch.ops, whose modules have types of their own
copyreg.pickle(type(torch.ops), lambda ops: (getattr, (torch, "ops")))
copyreg.pickle(type(torch.ops.aten), lambda ops: (getattr, (torch.ops, ops.name)))


class RankError(RuntimeError):
    """A call failed on a rank; the message has the rank and its traceback, `rank` the number."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank


@functools.cache
def ranks(n: int) -> "Pool":
    """The pool of n ranks of this process, started at its first call: ranks(n)(fn, *args) = [fn(*args) on rank r, r < n].

    Args:
        n: how many ranks; pools of different n live side by side.

    Returns: a Pool; call it.
    Cost: half a millisecond a call, and what pickling the arguments and results takes.

    >>> ranks(2)(lambda x: x + torch.distributed.get_rank(), 10)
    [10, 11]
    """
    return Pool(n)


@functools.cache
def mesh(**sizes: int) -> Mesh:
    """`fspeed.shard.mesh` of these sizes, made once on each rank, so that a property over many calls makes no new groups.

    >>> ranks(2)(lambda: mesh(data=2).axis("data").rank)
    [0, 1]
    """
    return make_mesh(**sizes)


class Pool:
    """n ranks, each a process with one thread and the default gloo group of all n; restarted when a call fails on some of them.

    Args:
        n: how many ranks.
        timeout: seconds until a collective, or a call, is given up.

    >>> with Pool(1, timeout=5) as pool:
    ...     pool(lambda: torch.distributed.get_world_size())
    [1]
    """

    def __init__(self, n: int, timeout: float = 60):
        self.n, self.timeout = n, timeout
        self.pipes: list[Connection] = []
        self.pids: list[int] = []

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, fn: Callable, *args: Any, timeout: float | None = None) -> list[Any]:
        """[fn(*args) on rank 0, ..., fn(*args) on rank n - 1].

        Functions travel by cloudpickle: those of a module by name, lambdas and closures by value.

        Args:
            fn, args: what to call.
            timeout: seconds until the call is given up; the pool's by default.

        Returns: the results, by rank.
        Raises: RankError, with the rank, its traceback and as `__cause__` its exception; TimeoutError with the ranks that did not
            answer; RuntimeError when the ranks return but made different collective calls. New ranks start at the next call then.
        """
        try:
            replies = self.ask(pickled((fn, args)), timeout or self.timeout)
            if not in_step(replies):
                self.settle(replies)
        except BaseException:
            self.close()
            raise
        return [value for value, _ in replies]

    def ask(self, call: bytes, timeout: float) -> list[tuple]:
        """(result, collective calls made so far) of every rank."""
        if not self.pipes:
            self.start()
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # that rank has died, as collect will tell
                pipe.send_bytes(call)
        return self.collect(timeout)

    def start(self) -> None:
        """Fork n ranks, and wait until their group stands."""
        store = f"{id(self)}-{time.monotonic_ns()}"
        self.pipes = [start_rank(rank, self.n, store, self.timeout) for rank in range(self.n)]
        self.pids = [pid for pid, _ in self.collect(timeout=60)]

    def collect(self, timeout: float) -> list[tuple]:
        """The reply of every rank; raises at the first failure, as the other ranks may be waiting for that one forever."""
        deadline = time.monotonic() + timeout
        pending: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        replies: dict[int, tuple] = {}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer in {timeout:g} s from ranks {sorted(pending.values())} of {self.n}")
            for pipe in ready:
                rank = pending.pop(pipe)
                reply = receive(pipe, rank)
                if isinstance(reply, RankError):
                    raise cause(reply, pending)
                replies[rank] = reply
        return [replies[rank] for rank in range(self.n)]

    def settle(self, replies: list[tuple]) -> None:
        """Raise unless a barrier of every group succeeds: its members' counts differ, which sends and receives may explain."""
        try:
            self.ask(pickled((barriers, ())), timeout=5)
        except (RankError, TimeoutError) as error:
            counts = [count for _, count in replies]
            raise RuntimeError(
                f"the ranks made different collective calls; {{(group, its ranks): calls}} by rank: {counts}"
            ) from error

    def close(self) -> None:
        """End the ranks; the next call starts new ones."""
        for pipe in self.pipes:
            pipe.close()
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.pipes, self.pids = [], []


def pickled(call: tuple[Callable, tuple]) -> bytes:
    return dumps((sys.path, dumps(call)))  # a rank needs the path before it can read the call


def dumps(value: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError("the pool of ranks sends functions by cloudpickle: pip install 'fspeed[test]'") from error
    return cloudpickle.dumps(value)


def receive(pipe: Any, rank: int) -> "tuple | RankError":
    """(result, collective calls made so far) of a rank, or its failure."""
    try:
        value, count, trace = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        value, count, trace = EOFError(), {}, "it died (a crash shows its stack on stderr)"
    if not trace:
        return value, count
    failure = RankError(f"rank {rank}: {trace}", rank)
    failure.__cause__ = value
    return failure


def cause(failure: RankError, pending: dict[Any, int]) -> RankError:
    """A failure, or the death of another rank that led to it and is told a moment later."""
    others = [receive(pipe, pending[pipe]) for pipe in wait(list(pending), timeout=0.05)]
    deaths = [other for other in others if isinstance(other, RankError) and isinstance(other.__cause__, EOFError)]
    return deaths[0] if deaths else failure


def in_step(replies: list[tuple]) -> bool:
    """Whether the members of every process group have made the same number of calls on it."""
    known: dict[tuple, int] = {}
    return all(known.setdefault(group, n) == n for _, count in replies for group, n in count.items())


# ---- the zygote and its ranks


@functools.cache
def zygote() -> socket.socket:
    """A child process that has imported torch and forks a rank for each message, and the socket to it."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    code = f"from fspeed.testing.pool import fork_ranks; fork_ranks({theirs.fileno()})"
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # also for safe forks
    env = {**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
    )
    theirs.close()

    def end() -> None:
        ours.close()
        child.wait()

    atexit.register(end)
    return ours


def start_rank(rank: int, n: int, store: str, timeout: float) -> Connection:
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(zygote(), [json.dumps([rank, n, store, timeout]).encode()], [theirs.fileno()])
    return Connection(ours.detach())


def fork_ranks(fd: int) -> None:
    """What the zygote does: fork a rank for each message; when the caller goes, end all ranks and itself."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    folder = tempfile.mkdtemp(prefix="ranks")
    with socket.socket(fileno=fd) as requests:
        while True:
            message, fds, *_ = socket.recv_fds(requests, 4096, 1)
            if not message:
                break
            if os.fork() == 0:
                requests.close()
                serve(Connection(fds[0]), folder, *json.loads(message))
            os.close(fds[0])
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def serve(pipe: Connection, folder: str, rank: int, n: int, store: str, timeout: float) -> None:
    """What a rank does: join the group, then answer calls."""
    torch.set_num_threads(1)
    faulthandler.enable()  # a rank that crashes shows where, on the caller's stderr
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    file = dist.FileStore(f"{folder}/{store}", n)
    dist.init_process_group("gloo", rank=rank, world_size=n, store=file, timeout=datetime.timedelta(seconds=timeout))
    pipe.send((os.getpid(), {}, ""))
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(answer(pipe.recv_bytes()))
    os._exit(0)


def answer(call: bytes) -> bytes:
    """The pickled reply: (result or exception, collective calls made so far, traceback if it failed)."""
    try:
        sys.path[:], body = pickle.loads(call)
        fn, args = pickle.loads(body)
        return dumps((fn(*args), calls_made(), ""))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            return dumps((error, {}, trace))
        except Exception:  # an exception that does not pickle: its text must do
            return dumps((None, {}, trace))


def barriers() -> None:
    """A barrier on each process group, in the order they were made."""
    for name, *_ in calls_made():
        dist.monitored_barrier(dist.distributed_c10d._resolve_process_group(name), timeout=datetime.timedelta(seconds=2))


def calls_made() -> dict[tuple, int]:
    """How many collectives this rank has made on each process group, by its name and ranks, where the backend counts."""
    counts = {}
    for group, name in dist.distributed_c10d._world.pg_names.items() if dist.is_initialized() else ():
        with contextlib.suppress(RuntimeError):
            counts[(name, *dist.get_process_group_ranks(group))] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return counts
