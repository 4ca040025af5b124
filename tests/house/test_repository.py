"""The repository itself, held against every bound: as `python -m tests.house`, a part of `make check`."""

import pytest

from tests.house.__main__ import main


def test_the_house_is_within_its_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out[-6000:]
