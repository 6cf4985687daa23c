"""A batch in microbatches."""
from fspeed.shard.pytree import tree_flatten, tree_unflatten
from fspeed.step import Batch


def split(batch: Batch, n: int) -> list[Batch]:
    """n parts of consecutive rows, as even as may be."""
    leaves, spec = tree_flatten(batch)
    return [tree_unflatten(spec, parts) for parts in zip(*(x.tensor_split(n) for x in leaves), strict=True)]
