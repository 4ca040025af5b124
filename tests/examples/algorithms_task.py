"""The algorithms of `examples/algorithms` at three sites each, as tasks by their names."""

import sys
from dataclasses import replace
from pathlib import Path

from atoll import load_task

HERE = Path(__file__).resolve().parents[2] / "examples" / "algorithms"
NAMES = ("feddyn", "fedexp", "fedcm", "ditto", "pfedme", "moon", "mime", "ifca")
SITES = ("site-0", "site-1", "site-2")

for name in NAMES:
    setattr(sys.modules[__name__], name, replace(load_task(f"{HERE / name}.py:task"), sites=SITES))
