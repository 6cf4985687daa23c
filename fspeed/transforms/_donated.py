"""A step that writes over the state it is given."""
from dataclasses import replace
from typing import Any

from fspeed.shard.piece import first_live
from fspeed.step import State, Step, Update, given


def donated(step: Step) -> Step:
    """The step with parameters and moments updated in place, and the state that it wrote over marked."""
    def update(apply: Update) -> Update:
        inner = step.update(apply)

        def run(grads: Any, state: State):
            new, metrics = inner(grads, state)
            state.params.written_over = written_over(state, new)
            return new, metrics

        return run

    return replace(step, update=update, own=given)


def written_over(old: State, new: State) -> bool:
    """Whether the parameters of a new state lie where an old state's did; a skipped step gives the old ones themselves."""
    return new.params is not old.params and first_live(old.params) is first_live(new.params)
