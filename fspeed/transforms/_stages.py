"""A sequential loss cut into the stages of a pipeline: which parts each has, and who owns each layer."""
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fspeed.layer import Names, Sequential
from fspeed.shard.schedules import Proof


class Stages(NamedTuple):
    """Of each stage its parts, from start to stop, and its layers; of each layer the ranks that own it."""
    spans: tuple[tuple[int, int], ...]
    names: tuple[tuple[str, ...], ...]
    owners: dict[str, tuple[int, ...]]


def staged(loss: Sequential, proof: Proof, cuts: Sequence[int]) -> Stages:
    """The stages that begin at part 0 and at `cuts`.

    >>> from fspeed.layer import sequential
    >>> from fspeed.shard.schedules import check, gpipe
    >>> loss = sequential([(name, None) for name in ("table", "a", "b", "table")])
    >>> staged(loss, check(gpipe(2, 1), 1), [2]).owners
    {'table': (0, 1), 'a': (0,), 'b': (1,)}
    """
    spans = tuple(itertools.pairwise((0, *cuts, len(loss.parts))))
    names = tuple(tuple(dict.fromkeys(n for part in loss.parts[a:b] for n in names_of(part[0]))) for a, b in spans)
    owners = {n: tuple(sorted({proof.owner[s] for s, ns in enumerate(names) if n in ns})) for n in loss.names}
    return Stages(spans, names, owners)


def names_of(names: Names) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else (names,)


def by_elements(loss: Sequential, sizes: Mapping[str, int]) -> list[int]:
    """How many elements each part uses.

    >>> from fspeed.layer import sequential
    >>> by_elements(sequential([("a", None), (["a", "b"], None)]), {"a": 2, "b": 3})
    [2, 5]
    """
    if unknown := [n for n in loss.names if n not in sizes]:
        raise ValueError(
            f"pipeline: part {unknown[0]!r} of the loss is no layer of these parameters, which are {', '.join(sizes)}; "
            "a layer that stands twice in the tree goes by its first path: name it so in fs.sequential, and it is tied"
        )
    return [sum(sizes[n] for n in names_of(names)) for names, _ in loss.parts]


def balanced(costs: Sequence[float], n: int) -> list[int]:
    """Where to cut a row of costs into n parts, none empty, so that the dearest is as cheap as may be.

    >>> balanced([1, 1, 1, 5], 2), balanced([4, 1, 1, 1, 1], 2)
    ([3], [1])
    """
    total = [0.0, *itertools.accumulate(map(float, costs))]

    @functools.cache
    def best(stop: int, parts: int) -> tuple[float, tuple[int, ...]]:
        if parts == 1:
            return total[stop], ()
        found: tuple[float, tuple[int, ...]] = (math.inf, ())
        for start in range(parts - 1, stop):
            dearest, cuts = best(start, parts - 1)
            found = min(found, (max(dearest, total[stop] - total[start]), (*cuts, start)), key=lambda x: x[0])
        return found

    return list(best(len(costs), n)[1])
