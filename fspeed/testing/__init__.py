"""A harness for property-testing training code: ranks as functions, drawn stacks and splits, and laws."""

from fspeed.testing.check import assert_close as assert_close
from fspeed.testing.check import assert_equal as assert_equal
from fspeed.testing.check import check_stack as check_stack
from fspeed.testing.check import check_transform as check_transform
from fspeed.testing.pool import mesh as mesh
from fspeed.testing.pool import ranks as ranks
from fspeed.testing.problem import Problem as Problem
from fspeed.testing.problem import problem as problem
from fspeed.testing.stacks import splits as splits
from fspeed.testing.stacks import stacks as stacks
