"""Views made by a separate process: cancelled, read slowly, failing, or large."""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path

import pytest

from atoll.server.views import view_process
from atoll.server.views.view_process import MAKING_MAX, PART_BYTES, Unseen, Viewer
from atoll.server.views.views import View
from tests.waiting import BOUND_S

LONG = "sys.stdin.readline(); sys.stdout.buffer.write(b'0 50000000\\n' + bytes(50_000_000)); sys.stdout.flush()"


def process(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", f"import sys, time, os\n{code}"


def run(test: Coroutine[object, object, object]) -> None:
    asyncio.run(asyncio.wait_for(test, BOUND_S))


async def looked(viewer: Viewer) -> bytes:
    return b"".join([part async for part in viewer.look(View.RUNS, "", 0)])


async def seen(viewer: Viewer) -> bytes:
    """Return one view, and end the process that made it."""
    try:
        return await looked(viewer)
    finally:
        await viewer.close()


def test_readers_that_stop_keep_nobody_waiting_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_process, "COMMAND", process(LONG))

    async def main() -> None:
        it = Viewer(tmp_path)
        await seen(it)
        before = len(os.listdir("/proc/self/fd"))
        stalled = [it.look(View.RUNS, "", 0) for _ in range(2 * MAKING_MAX)]
        for look in stalled:
            assert len(await anext(look)) == PART_BYTES
        assert len(await seen(it)) == 50_000_000
        for look in stalled:
            await look.aclose()
        assert len(os.listdir("/proc/self/fd")) == before

    run(main())
    assert not any(tmp_path.iterdir())


def test_a_look_that_is_broken_off_ends_its_process_and_gives_its_turn_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    monkeypatch.setattr(
        view_process, "COMMAND", process(f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    )

    async def main() -> None:
        it = Viewer(tmp_path)
        for _ in range(2 * MAKING_MAX):
            pid.unlink(missing_ok=True)
            task = asyncio.ensure_future(seen(it))
            while not (pid.exists() and pid.read_text()):
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid.read_text()), 0)
        monkeypatch.setattr(view_process, "MAKING_S", 0.3)
        with pytest.raises(Unseen, match=r"takes more than 0\.3 s"):
            await seen(it)

    run(main())


@pytest.mark.parametrize(
    ("code", "kind", "told"),
    [
        ("sys.stderr.write('there is no run'); sys.exit(4)", LookupError, "^there is no run$"),
        ("sys.stderr.write('locked'); sys.exit(3)", Unseen, "^locked$"),
        ("sys.stderr.write('x' * 3_000_000); 1 / 0", Unseen, "could not be made: ZeroDivisionError: division by zero$"),
    ],
    ids=["missing", "unusable", "crashed"],
)
def test_why_there_is_no_view_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, kind: type[Exception], told: str
) -> None:
    monkeypatch.setattr(view_process, "COMMAND", process(code))
    with pytest.raises(kind, match=told):
        run(seen(Viewer(tmp_path)))


def test_a_directory_that_holds_no_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unseen, match=f"{tmp_path} is not a state directory"):
        run(seen(Viewer(tmp_path)))


def test_the_process_ends_with_the_coordinator() -> None:
    code = "import time, atoll.server.views.view_process as v; v.History = lambda *_: time.sleep(600); v.main()"

    async def main() -> None:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE)
        assert child.stdin is not None
        child.stdin.write(b'{"state": "x", "database": "", "view": "runs", "run": "", "number": 0, "paging": {}}\n')
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(child.wait(), 2)
        child.stdin.close()  # as the kernel does when the coordinator is killed
        assert await asyncio.wait_for(child.wait(), BOUND_S) == view_process.EXIT_UNUSABLE

    run(main())


@pytest.mark.usefixtures("cold_start")
def test_text_goes_as_utf_8_wherever_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    code = (
        "import atoll.server.views.view_process as v; v.History = lambda *_: 1; "
        "v.look = lambda *_: 'h\\u00e4fen'; v.main()"
    )
    monkeypatch.setattr(view_process, "COMMAND", (sys.executable, "-c", code))
    assert asyncio.run(seen(Viewer(tmp_path))).decode() == '"h\u00e4fen"'


ECHO = (
    "for number, line in enumerate(sys.stdin):\n"
    "    text = f'{os.getpid()} {number}'.encode()\n"
    "    sys.stdout.buffer.write(b'%d %d\\n%s' % (4 if number == 2 else 0, len(text), text)); sys.stdout.flush()\n"
)


def test_one_process_answers_one_view_after_the_other_also_after_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_process, "COMMAND", process(ECHO))

    async def main() -> None:
        it = Viewer(tmp_path)
        pid, number = (await looked(it)).split()
        assert number == b"0"
        assert await looked(it) == pid + b" 1"
        with pytest.raises(LookupError, match=f"^{int(pid)} 2$"):
            await looked(it)
        assert await looked(it) == pid + b" 3"
        first, second = await asyncio.gather(looked(it), looked(it))
        assert {pid + b" 4"} < {first, second}, "the other is from a process of its own"
        os.kill(int(pid), signal.SIGKILL)
        await _until_gone(int(pid))
        other, number = (await looked(it)).split()
        assert (other != pid, number) == (True, b"0"), "a process that died while it was idle is replaced"
        await it.close()
        with pytest.raises(ProcessLookupError):
            os.kill(int(other), 0)

    run(main())
    assert not any(tmp_path.iterdir())


def test_an_idle_process_ends_and_so_does_one_that_made_a_large_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_process, "COMMAND", process(ECHO))

    async def main() -> None:
        it = Viewer(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(view_process, "IDLE_S", 0.05)
            pid, _ = (await looked(it)).split()
        await _until_gone(int(pid))
        monkeypatch.setattr(view_process, "KEPT_BYTES_MAX", 1)
        pid, _ = (await looked(it)).split()
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
        await it.close()

    run(main())


async def _until_gone(pid: int) -> None:
    with suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            await asyncio.sleep(0.01)
