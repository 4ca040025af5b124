"""What the tests of this room share."""

import pytest

from atoll.aggregation import codec_loops, stacked_loops, tally
from atoll.aggregation.compiler import COMPILED_FROM


@pytest.fixture
def compiled() -> None:
    """The loops are loaded, once in a process: a test that measures memory does not mean the compiler's."""
    for loops_for in (codec_loops.loops_for, stacked_loops.loops_for, tally.loop_for):
        loops_for(COMPILED_FROM)
