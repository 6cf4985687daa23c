"""fspeed: training steps as pure functions, and transforms that compose in any order."""

from fspeed import optim as optim
from fspeed import random as random
from fspeed.functional import functional as functional
from fspeed.layer import layer as layer
from fspeed.layer import sequential as sequential
from fspeed.loss import Loss as Loss
from fspeed.loss import mean as mean
from fspeed.save import latest as latest
from fspeed.save import restore as restore
from fspeed.save import save as save
from fspeed.shard.mesh import mesh as mesh
from fspeed.step import Batch as Batch
from fspeed.step import State as State
from fspeed.step import Step as Step
from fspeed.step import step as step
from fspeed.transforms.accumulate import accumulate as accumulate
from fspeed.transforms.checkpoint import checkpoint as checkpoint
from fspeed.transforms.checkpoint import remat as remat
from fspeed.transforms.data_parallel import data_parallel as data_parallel
from fspeed.transforms.donate import donate as donate
from fspeed.transforms.mixed_precision import LossScaling as LossScaling
from fspeed.transforms.mixed_precision import mixed_precision as mixed_precision
from fspeed.transforms.skip_nonfinite import skip_nonfinite as skip_nonfinite
from fspeed.transforms.zero_shard import zero_shard as zero_shard
from fspeed.tree import lazy as lazy
from fspeed.tree import whole as whole
