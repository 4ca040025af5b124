"""Measurements of the whole thing, as real processes; each prints one JSON object as its last line (`report`).

Whatever a benchmark has started ends with it, also when it is killed (`reaper`).
"""

import os

from benchmarks import reaper

if reaper.VARIABLE not in os.environ:  # otherwise an ancestor is watched already
    reaper.watch()
