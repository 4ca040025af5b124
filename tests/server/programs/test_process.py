"""The supervisor of a server program's process, with a process of the test's own."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.server.programs import process
from atoll.server.programs.process import ProgramProcess
from tests.wire.test_round import live

CALLS_ONCE = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.recv(99); s.sendall(%r); s.recv(99)"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b'{"op": "send", "call": 1}\n', FileNotFoundError("contents/c.safetensors")),
        (b'{"op": "send", "call": 1}\n', ValueError("there is no content c")),
        (b'{"op": "send", "call": 1}\n', KeyError("messages")),
        (b"no JSON\n", None),
        (b"[]\n", None),
    ],
)
@live
async def test_a_call_that_cannot_be_met_ends_the_process_as_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, error: Exception | None
) -> None:
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-c", CALLS_ONCE % line))
    ended: asyncio.Future[tuple[str, bool]] = asyncio.get_running_loop().create_future()

    def called(call: dict[str, Any]) -> None:
        assert error is not None
        raise error

    program = ProgramProcess({}, tmp_path, tmp_path / "log", called, lambda *end: ended.set_result(end))
    await program.start()
    try:
        assert await ended == ("", True)
        assert program.pid is None
    finally:
        await program.stop()
