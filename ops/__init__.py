"""Ops: each a folder with a plain reference, a CPU path and a Triton kernel."""

from .blockwise import adamw8bit as adamw8bit
from .blockwise import adamw8bit_ as adamw8bit_
from .blockwise import moments8bit as moments8bit
from .clipping import unscale_clip as unscale_clip
from .compress import dequantise as dequantise
from .compress import quantise as quantise
from .compress import sign_pack as sign_pack
from .compress import sign_unpack as sign_unpack
from .layerwise import lamb as lamb
from .layerwise import lamb_ as lamb_
from .newton import newton_schulz as newton_schulz
from .optimizers import adamw as adamw
from .optimizers import adamw_ as adamw_
from .optimizers import lion as lion
from .optimizers import lion_ as lion_
from .optimizers import sgd_momentum as sgd_momentum
from .optimizers import sgd_momentum_ as sgd_momentum_
from .xent import cross_entropy as cross_entropy
from .xent import linear_cross_entropy as linear_cross_entropy
from .xent import linear_cross_entropy_sum as linear_cross_entropy_sum
from .xent import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from .xent import vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy
