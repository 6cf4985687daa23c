"""The counters count exactly: elements by the collectives' calls, bytes by the allocator's events."""
import pytest
import torch

from fspeed.shard.collectives import all_gather, all_to_all, pmax, psum, reduce_scatter
from fspeed.testing import mesh, ranks
from fspeed.testing.count import Counted, allocated_peak, stored_bytes

CALLS = {       # of 60 elements a rank: what one of N ranks sends
    psum: lambda n: 2 * 60 * (n - 1) / n, reduce_scatter: lambda n: 60 * (n - 1) / n, all_gather: lambda n: 60 * (n - 1),
    all_to_all: lambda n: 60 * (n - 1) / n,
}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_elements_sent(call, n):
    def run():
        axis = mesh(data=n).axis("data")
        with Counted(n, least=1) as counted:
            call(torch.ones(60), axis)
        return counted.total

    assert ranks(n)(run) == [CALLS[call](n)] * n


def test_small_messages_and_no_messages_count_as_nothing():
    def run():
        axis = mesh(data=2).axis("data")
        with Counted(2) as counted:
            psum(torch.ones(31), axis)
            torch.ones(100) + 1
        return counted.total, dict(counted.calls)

    assert ranks(2)(run) == [(0, {})] * 2


def test_a_derivative_is_counted_too():
    def run():
        axis = mesh(data=2).axis("data")
        with Counted(2) as counted:
            torch.func.vjp(lambda x: all_gather(x, axis), torch.ones(40))[1](torch.ones(80))
        return counted.total

    assert ranks(2)(run) == [40 + 80 // 2] * 2


def test_gathered_bytes_alive_at_once():
    def run(keep):
        axis = mesh(data=2).axis("data")
        with Counted(2) as counted:
            kept = [all_gather(torch.ones(40), axis) for _ in range(3)] if keep else None
            for _ in range(3):
                all_gather(torch.ones(40), axis)
            del kept
        return counted.gathered

    assert ranks(2)(run, False) == [80 * 4] * 2
    assert ranks(2)(run, True) == [4 * 80 * 4] * 2


def test_pmax_is_an_exchange_and_a_gather():
    def run():
        axis = mesh(data=2).axis("data")
        with Counted(2) as counted:
            pmax(torch.ones(80), axis)
        return counted.total

    assert ranks(2)(run) == [40 + 40] * 2


@pytest.mark.parametrize("fn, expected", [
    (lambda: None, 0), (lambda: torch.zeros(100), 400), (lambda: torch.zeros(100).clone(), 800),
    (lambda: [torch.zeros(100).sum() for _ in range(5)], None),
])
def test_allocated_peak(fn, expected):
    peak = allocated_peak(fn)
    assert peak == expected if expected is not None else 400 <= peak <= 500


def test_stored_bytes_counts_a_storage_once():
    x = torch.zeros(10)
    assert stored_bytes({"a": x, "b": x[2:], "c": x.view(5, 2), "d": torch.zeros(3), "n": 3}) == 52
