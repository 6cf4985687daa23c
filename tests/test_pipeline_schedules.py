"""Pipeline schedules: each is complete and ends, holds and waits as its formula says, and a wrong one is refused by name."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fspeed.shard.schedules import Action, Schedule, check, gpipe, interleaved, one_f_one_b, zero_bubble

MAKERS = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved 2": interleaved(2), "interleaved 3": interleaved(3),
          "zero bubble": zero_bubble}


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=150)
@given(ranks=st.integers(1, 9), microbatches=st.integers(1, 24))
def test_every_schedule_ends_and_holds_what_it_promises(name, ranks, microbatches):
    schedule = MAKERS[name](ranks, microbatches)
    proof = check(schedule, microbatches)
    assert proof.live == schedule.live
    assert schedule.idle is None or proof.idle == schedule.idle
    assert proof.stages == ranks * (int(name[-1]) if name[-1].isdigit() else 1)


@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 16))
def test_formulas(ranks, microbatches):
    """1F1B: idle share (s - 1) / (m + s - 1), at most s - stage activations, in GPipe's time. A split backward idles a third."""
    s, m = ranks, microbatches
    proof = check(one_f_one_b(s, m), m)
    assert proof.slots == 3 * (m + s - 1) == check(gpipe(s, m), m).slots
    assert proof.live == tuple(min(m, s - r) for r in range(s))
    if m >= s:
        assert check(zero_bubble(s, m), m).slots == 3 * m + s - 1
    if m % s == 0:
        assert check(interleaved(4)(s, m), m).slots == 3 * (4 * m + s - 1)


def rows(schedule):
    return [list(actions) for actions in schedule.ranks]


@settings(max_examples=60)
@given(st.sampled_from([*MAKERS]), st.integers(1, 4), st.integers(1, 5), st.data())
def test_a_schedule_without_or_with_twice_an_action_is_refused(name, ranks, microbatches, data):
    plan = rows(MAKERS[name](ranks, microbatches))
    rank = data.draw(st.integers(0, ranks - 1))
    at = data.draw(st.integers(0, len(plan[rank]) - 1))
    again = data.draw(st.booleans())
    plan[rank][at : at + 1] = [plan[rank][at]] * 2 if again else []
    with pytest.raises(ValueError, match=r"on microbatch \d+; it must do F and B, or F, I and W|without gaps"):
        check(plan, microbatches)


@given(st.integers(2, 4), st.integers(1, 4))
def test_a_schedule_that_deadlocks_names_the_actions_that_wait(ranks, microbatches):
    plan = rows(one_f_one_b(ranks, microbatches))
    plan[0].insert(0, plan[0].pop())
    last = microbatches - 1
    late = rf"never ends: rank 0 waits at B0.{last} for F0.{last}, which it runs later; rank 1 waits at F1.0 for F0.0, which rank 0"
    with pytest.raises(ValueError, match=late):
        check(plan, microbatches)


WRONG = {
    "rank 1 has an action 'X' of stage 1": [[("F", 0, 0), ("B", 0, 0)], [("X", 1, 0)]],
    "stage 0 is on ranks 0 and 1": [[("F", 0, 0)], [("B", 0, 0)]],
    r"stages \[0, 2\]; they are numbered from 0": [[("F", 0, 0), ("B", 0, 0), ("F", 2, 0), ("B", 2, 0)]],
    r"has F0\.1, but there are 1 microbatches|has B0\.1, but": [[("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)]],
    r"stages \[\]": [[], []],
    "stage 0 does F, I on microbatch 0": [[("F", 0, 0), ("I", 0, 0)]],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_schedules(message):
    with pytest.raises(ValueError, match=message):
        check(WRONG[message], 1)


@pytest.mark.parametrize("promise, message", [({"live": (1, 1)}, "at most .1, 1. live"), ({"idle": (2, 3)}, "at most .2, 3. idle")])
def test_a_broken_promise(promise, message):
    with pytest.raises(ValueError, match=message):
        check(Schedule(one_f_one_b(2, 4).ranks, **promise), 4)


def test_a_schedule_that_somebody_wrote():
    """Two stages on rank 0 round one on rank 1."""
    plan = [[("F", 0, 0), ("F", 2, 0), ("B", 2, 0), ("B", 0, 0)], [("F", 1, 0), ("I", 1, 0), ("W", 1, 0)]]
    proof = check(plan, 1)
    assert proof.owner == (0, 1, 0) and proof.live == (2, 1) and proof.slots == 8
    assert proof.schedule.ranks[1][1] == Action("I", 1, 0)


def test_chunks():
    with pytest.raises(ValueError, match="chunks must be a positive integer, got 0"):
        interleaved(0)
