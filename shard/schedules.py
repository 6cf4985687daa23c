"""Pipeline schedules as data: for each rank, the actions that it takes in order; and a proof of one before it runs.

    F(stage, micro)     forward
    B(stage, micro)     backward; or, in two,
    I(stage, micro)     the gradient of what the stage was given, which the stage before it waits for
    W(stage, micro)     the gradient of its parameters, which nobody waits for

A stage lives on the rank that runs it forward; a rank may have several. In time, F, I and W count one slot each and B two.
"""
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}
RELEASES = {"F": 1, "B": -1, "I": 0, "W": -1}       # what an action does to the number of live activations


class Action(NamedTuple):
    """One thing that a rank does: kind "F", "B", "I" or "W", of a stage, on a microbatch."""
    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


@dataclass(frozen=True)
class Schedule:
    """What each rank does, in order, and what is promised of it; `check` holds it to that.

    Args:
        ranks: for each rank, its actions.
        live: for each rank, how many activations it holds at most, from F to B or W; None: no promise.
        idle: for each rank, how many slots it waits while any rank works; None: no promise.
    """
    ranks: tuple[tuple[Action, ...], ...]
    live: tuple[int, ...] | None = None
    idle: tuple[int, ...] | None = None


Schedules = Callable[[int, int], Schedule]              # (ranks, microbatches) -> a schedule


# ---------------------------------------------------------------- those that are known
def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

        idle = 3 (s - 1) slots a rank,   live = m

    Args:
        ranks, microbatches: s and m, at least 1.

    Source: Huang et al., arXiv 1811.06965.

    >>> print(*map(str, gpipe(2, 2).ranks[1]))
    F1.0 F1.1 B1.0 B1.1
    """
    orders = [ordered(*of_stage(r, microbatches), microbatches) for r in range(ranks)]
    return promised(orders, [microbatches] * ranks, [3 * (ranks - 1)] * ranks)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """As many forwards as there are stages behind, then one backward for each forward.

        idle = 3 (s - 1) slots a rank,   live = min(m, s - stage)

    Args:
        ranks, microbatches: s and m, at least 1.

    Source: Narayanan et al., arXiv 1806.03377; flushed each step, arXiv 2006.09503.

    >>> print(*map(str, one_f_one_b(2, 3).ranks[0]))
    F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
    """
    orders = [ordered(*of_stage(r, microbatches), ranks - 1 - r) for r in range(ranks)]
    return promised(orders, [min(microbatches, ranks - r) for r in range(ranks)], [3 * (ranks - 1)] * ranks)


def interleaved(chunks: int) -> Schedules:
    """1F1B with several stages a rank: stage c s + r is on rank r, so that a pipeline fills in chunks times less time.

        idle = 3 (s - 1) slots a rank, each 1/chunks as long, where s divides m
        live = min(m chunks, 2 (s - 1 - r) + (chunks - 1) n + 1),   n the microbatches of the longest round

    Microbatches go through chunk after chunk in rounds; rounds are even and, where m allows, no shorter than s.

    Args:
        chunks: stages a rank, at least 1.

    Returns:
        A function of ranks s and microbatches m.

    Source: Narayanan et al., arXiv 2104.04473. A short last round, taken literally, deadlocks; even rounds do not.

    >>> print(*map(str, interleaved(2)(2, 2).ranks[0]))
    F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1
    """
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"interleaved: chunks must be a positive integer, got {chunks!r}")

    def make(ranks: int, microbatches: int) -> Schedule:
        n = max(1, microbatches // ranks)
        ends = [i * microbatches // n for i in range(n + 1)]
        rounds = [range(a, b) for a, b in itertools.pairwise(ends)]
        longest = max(map(len, rounds))
        orders, live = [], []
        for r in range(ranks):
            fwd = [Action("F", c * ranks + r, m) for ms in rounds for c in range(chunks) for m in ms]
            bwd = [Action("B", c * ranks + r, m) for ms in rounds for c in reversed(range(chunks)) for m in ms]
            first = 2 * (ranks - 1 - r) + (chunks - 1) * longest if chunks > 1 else ranks - 1 - r
            orders.append(ordered(fwd, bwd, first))
            live.append(min(len(fwd), first + 1))
        even = microbatches % ranks == 0 or chunks == 1
        return promised(orders, live, [3 * (ranks - 1)] * ranks if even else None)

    return make


def zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """1F1B with backward split in two: rank r takes each weight gradient r microbatches late, where it would wait.

        idle = s - 1 slots a rank where m >= s,   live = min(m, s)

    Args:
        ranks, microbatches: s and m, at least 1.

    Source: ZB-H1 of Qi et al., arXiv 2401.10241.

    >>> print(*map(str, zero_bubble(2, 2).ranks[1]))
    F1.0 I1.0 F1.1 I1.1 W1.0 W1.1
    """
    def order(r: int) -> list[Action]:
        out: list[Action] = []
        for a in one_f_one_b(ranks, microbatches).ranks[r]:
            late = [Action("W", r, a.micro - r)] if a.micro >= r else []
            out += [a] if a.kind == "F" else [a._replace(kind="I"), *late]
        return out + [Action("W", r, m) for m in range(max(microbatches - r, 0), microbatches)]

    enough = microbatches >= ranks
    return promised([order(r) for r in range(ranks)], [min(microbatches, ranks)] * ranks, [ranks - 1] * ranks if enough else None)


def of_stage(stage: int, microbatches: int) -> tuple[list[Action], list[Action]]:
    """All forwards of a stage, and all backwards."""
    return [Action("F", stage, m) for m in range(microbatches)], [Action("B", stage, m) for m in range(microbatches)]


def ordered(fwd: list[Action], bwd: list[Action], first: int) -> list[Action]:
    """`first` forwards, then a forward, while there is one, before each backward."""
    pairs = [a for i, b in enumerate(bwd) for a in (*fwd[first + i : first + i + 1], b)]
    return [*fwd[:first], *pairs]


def promised(orders: Iterable[Iterable[Action]], live: Sequence[int], idle: Sequence[int] | None) -> Schedule:
    return Schedule(tuple(map(tuple, orders)), tuple(live), None if idle is None else tuple(idle))


# ---------------------------------------------------------------- proofs
@dataclass(frozen=True)
class Proof:
    """What `check` found of a schedule.

    Args:
        schedule: what was proved.
        stages, microbatches: how many there are.
        owner: the rank of each stage.
        live: for each rank, how many activations it holds at most.
        idle: for each rank, how many slots it waits until the last rank is done.
        slots: how many slots it all takes.
    """
    schedule: Schedule
    stages: int
    microbatches: int
    owner: tuple[int, ...]
    live: tuple[int, ...]
    idle: tuple[int, ...]
    slots: int


def check(schedule: Schedule | Sequence[Sequence[Any]], microbatches: int) -> Proof:
    """Prove a schedule: each F and B, or I and W, once, on one rank a stage, in an order that ends, and as it promises.

    Args:
        schedule: a `Schedule`, or for each rank a list of `Action`s or (kind, stage, micro)s.
        microbatches: how many.

    Returns:
        A `Proof`.

    Raises:
        ValueError: which action is missing, twice, misplaced or unknown; which actions wait for ever; which promise is broken.

    Cost: linear in the number of actions, times ranks.

    >>> check([[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("B", 1, 0)]], 1).idle
    (3, 3)
    >>> check([[("B", 0, 0), ("F", 0, 0)]], 1)
    Traceback (most recent call last):
    ValueError: this schedule never ends: rank 0 waits at B0.0 for F0.0, which it runs later
    """
    if not isinstance(schedule, Schedule):
        schedule = Schedule(tuple(tuple(Action(*a) for a in rank) for rank in schedule))
    owner = owners(schedule)
    complete(schedule, owner, microbatches)
    live, done = simulated(schedule, owner)
    slots = max(done)
    idle = tuple(slots - sum(SLOTS[a.kind] for a in rank) for rank in schedule.ranks)
    for what, promise, found in (("live activations", schedule.live, live), ("idle slots", schedule.idle, idle)):
        if promise is not None and any(f > p for f, p in zip(found, promise, strict=True)):
            raise ValueError(f"this schedule promises at most {promise} {what} on its ranks, but has {found}")
    return Proof(schedule, len(owner), microbatches, owner, live, idle, slots)


def owners(schedule: Schedule) -> tuple[int, ...]:
    """The rank of each stage."""
    found: dict[int, int] = {}
    for rank, actions in enumerate(schedule.ranks):
        for a in actions:
            if a.kind not in SLOTS:
                raise ValueError(f"rank {rank} has an action {a.kind!r} of stage {a.stage}; there are F, B, I and W")
            if found.setdefault(a.stage, rank) != rank:
                raise ValueError(f"stage {a.stage} is on ranks {found[a.stage]} and {rank}; a stage lives on one rank")
    if sorted(found) != list(range(len(found))) or not found:
        raise ValueError(f"this schedule has stages {sorted(found)}; they are numbered from 0 without gaps")
    return tuple(found[s] for s in range(len(found)))


def complete(schedule: Schedule, owner: tuple[int, ...], microbatches: int) -> None:
    """Raise unless every stage does its F, and its B or its I and W, once on every microbatch."""
    count = Counter(a for actions in schedule.ranks for a in actions)
    for stage in range(len(owner)):
        for micro in range(microbatches):
            kinds = "".join(k * count.pop(Action(k, stage, micro), 0) for k in "FBIW")
            if kinds not in ("FB", "FIW"):
                got = ", ".join(kinds) or "nothing"
                raise ValueError(f"stage {stage} does {got} on microbatch {micro}; it must do F and B, or F, I and W, each once")
    if count:
        raise ValueError(f"this schedule has {min(count)}, but there are {microbatches} microbatches, from 0")


def needs(a: Action, stages: int) -> list[Action]:
    """What an action waits for; I stands for B too. The last is what comes from another stage."""
    if a.kind == "F":
        return [Action("F", a.stage - 1, a.micro)] if a.stage else []
    if a.kind == "W":
        return [Action("I", a.stage, a.micro)]
    behind = [Action("I", a.stage + 1, a.micro)] if a.stage + 1 < stages else []
    return [Action("F", a.stage, a.micro), *behind]


def as_needed(a: Action) -> Action:
    return a._replace(kind="I") if a.kind == "B" else a


def simulated(schedule: Schedule, owner: tuple[int, ...]) -> tuple[tuple[int, ...], list[int]]:
    """Run a schedule in slots: for each rank its most live activations, and when it is done."""
    ranks, stages = schedule.ranks, len(owner)
    at, clock, live, most = ([0] * len(ranks) for _ in range(4))
    done: dict[Action, int] = {}
    moved = True
    while moved:
        moved = False
        for r, actions in enumerate(ranks):
            while at[r] < len(actions) and all(n in done for n in needs(actions[at[r]], stages)):
                a = actions[at[r]]
                begin = max([clock[r], *(done[n] for n in needs(a, stages))])
                clock[r] = done[as_needed(a)] = begin + SLOTS[a.kind]
                live[r] += RELEASES[a.kind]
                most[r] = max(most[r], live[r])
                at[r], moved = at[r] + 1, True
    stuck = [r for r, actions in enumerate(ranks) if at[r] < len(actions)]
    if stuck:
        raise ValueError("this schedule never ends: " + "; ".join(waits(r, ranks[r], at[r], done, owner) for r in stuck))
    return tuple(most), clock


def waits(rank: int, actions: Sequence[Action], at: int, done: dict[Action, int], owner: tuple[int, ...]) -> str:
    missing = next(n for n in needs(actions[at], len(owner)) if n not in done)
    where = "it" if owner[missing.stage] == rank else f"rank {owner[missing.stage]}"
    return f"rank {rank} waits at {actions[at]} for {missing}, which {where} runs later"
