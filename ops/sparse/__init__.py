"""Block-sparse attention: layouts say which blocks of queries see which blocks of keys, and only those are computed."""
from .layout import Blocks as Blocks
from .layout import Layout as Layout
from .layout import stack as stack
