"""What ops take beside tensors, as pytree nodes."""
from fspeed.ops.sparse.layout import Blocks, Layout
from fspeed.shard.pytree import register

register(Blocks, ("start", "full", "index", "mask"))
register(Layout, ("rows", "columns", "masks"), ("block", "heads", "lengths"))
