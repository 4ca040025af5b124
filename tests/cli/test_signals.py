"""The effect of a signal on processes that wait for a coordinator without an answer."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from atoll.protocol.identity.join_code import JoinCode
from tests.cli.federation import ATOLL
from tests.cli.invoking import TINY
from tests.waiting import BOUND_S

NOBODY = str(JoinCode(("127.0.0.1:1",), bytes(32), bytes(8), bytes(16)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "arguments", [("agent", f"{TINY}:task", "--site", "north"), ("aggregator", "--rank", "0", "--of", "1")]
)
def test_a_process_that_waits_to_enrol_ends_in_order(
    tmp_path: Path, arguments: tuple[str, ...], number: signal.Signals
) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        command = [str(ATOLL), *arguments, "--state", str(tmp_path / "state"), "--join", NOBODY]
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        until = time.monotonic() + BOUND_S
        while "trying again" not in log.read_text():
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text()
