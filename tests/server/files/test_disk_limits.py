"""The space that stays free: a value beyond the disk is refused, one beyond the free space is told."""

import logging
import shutil
from collections import namedtuple

import pytest

from atoll.server.errors import OperatorError
from atoll.server.files.disk_limits import check_free_min

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("free_min", [1000, 2**60])
def test_a_value_beyond_the_disk_is_refused_with_the_value_the_disk_and_the_way_out(tmp_path, monkeypatch, free_min):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000, 100, 900))
    with pytest.raises(OperatorError, match=rf"disk_free_min: got {free_min};.* has 1000 bytes in total.*67108864"):
        check_free_min(tmp_path / "not" / "yet", free_min)


def test_a_value_beyond_the_free_space_is_told_and_one_below_is_not(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000, 100, 900))
    with caplog.at_level(logging.WARNING):
        check_free_min(tmp_path, 900)
        assert caplog.messages == []
        check_free_min(tmp_path, 999)
    assert "900 bytes free" in caplog.text
    assert "uploads wait" in caplog.text


def test_the_real_disk_takes_the_default(tmp_path):
    check_free_min(tmp_path / "new", 1 << 20)
