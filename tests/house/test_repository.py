"""The repository itself, held against every bound: as `python -m tests.house`, a part of `make check`."""

import re

import pytest

from tests.house.__main__ import main
from tests.house.tree import ROOMS, ROOT, read


def test_the_house_is_within_its_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out[-6000:]


def test_work_leaves_the_event_loop_in_one_place() -> None:
    asked = re.compile(r"\b(run_in_executor|to_thread)\(")
    found = [module.path for module in read(ROOT, ROOMS) if asked.search(module.source)]
    assert found == ["protocol/threads.py"]
