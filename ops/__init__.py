"""Ops: each a folder with a plain reference, a CPU path and a Triton kernel."""

from .activations import bias_gelu as bias_gelu
from .activations import geglu as geglu
from .activations import swiglu as swiglu
from .dropouts import bias_dropout_residual as bias_dropout_residual
from .norms import layer_norm as layer_norm
from .norms import rms_norm as rms_norm
from .rope import rotary as rotary
from .rope import rotary_table as rotary_table
from .softmaxes import softmax as softmax
from .xent import cross_entropy as cross_entropy
from .xent import linear_cross_entropy as linear_cross_entropy
from .xent import linear_cross_entropy_sum as linear_cross_entropy_sum
from .xent import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from .xent import vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy
