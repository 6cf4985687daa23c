"""Transformations of some leaves only."""
from collections.abc import Callable
from typing import Any, NamedTuple

Mask = Any | Callable[[Any], Any]


class MaskedState(NamedTuple):
    """The state of a transformation that sees some leaves only."""
    inner_state: Any
