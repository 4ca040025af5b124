"""The log of a process that runs user's code stays bounded while the process lives."""

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.ground.process import log_streams

MOST = 10_000
CHATTER = f"""
import os, time
from atoll.ground.process import log_streams
log_streams.LOG_BYTES_MAX, log_streams.LOOK_S = {MOST}, 0.01
os.dup2(2, 1)
log_streams.write_to_log()
def settle():
    while os.stat("worker.log").st_size > {MOST}:
        time.sleep(0.005)
for number in range(3):
    print("x" * {MOST}, "print", number)
    settle()
    os.system(f"printf '%{MOST + 1}d' {{number}}")
    settle()
print("the end")
"""


def output_of(code: str, folder: Path) -> None:
    """Run a process whose output is appended to `worker.log`."""
    with log_streams.open_log(folder / "worker.log") as log:
        subprocess.run([sys.executable, "-c", code], cwd=folder, stderr=log, check=True, timeout=120)


@pytest.mark.real
def test_a_log_stays_bounded_while_its_process_lives(tmp_path: Path) -> None:
    output_of(CHATTER, tmp_path)
    older, newer = (tmp_path / "worker.log.1").read_text(), (tmp_path / "worker.log").read_text()
    assert newer == "the end\n"
    assert (len(older), older[-1]) == (MOST, "2"), "the end of the last long line, of another process"


@pytest.mark.real
def test_a_log_is_bounded_where_there_is_no_room_for_the_older_one(tmp_path: Path) -> None:
    (tmp_path / "worker.log.1").symlink_to("/dev/full")
    output_of(CHATTER, tmp_path)
    assert (tmp_path / "worker.log").read_text() == "the end\n"


def test_a_log_that_is_large_at_the_start_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_streams, "LOG_BYTES_MAX", 10)
    for content, older in (("x" * 10, False), ("x" * 11, True)):
        (tmp_path / "worker.log").write_text(content)
        log_streams.open_log(tmp_path / "worker.log").close()
        assert (tmp_path / "worker.log.1").exists() is older
    assert (tmp_path / "worker.log").read_text() == ""
