"""The fixtures of this room's tests."""

import pytest

from atoll.aggregation.stacked import passes
from atoll.tensors.codecs import kernels
from atoll.tensors.numba_support import COMPILED_FROM
from atoll.tensors.updates import tensor_stats


@pytest.fixture
def compiled() -> None:
    """The loops are loaded, once in a process: a test that measures memory does not mean the compiler's."""
    for loops_for in (kernels.loops_for, passes.loops_for, tensor_stats.loop_for):
        loops_for(COMPILED_FROM)
