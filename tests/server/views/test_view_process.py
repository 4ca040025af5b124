"""Views made by a separate process: cancelled, read slowly, failing, or large."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path

import pytest

from atoll.server.views import view_process
from atoll.server.views.view_process import MAKING_MAX, PART_BYTES, Unseen, Viewer
from atoll.server.views.views import View

LONG = "sys.stdout.buffer.write(bytes(50_000_000))"


def process(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", f"import sys, time, os\n{code}"


def run(test: Coroutine[object, object, object]) -> None:
    asyncio.run(asyncio.wait_for(test, 40))


async def seen(viewer: Viewer) -> bytes:
    return b"".join([part async for part in viewer.look(View.RUNS, "", 0)])


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
        view_process, "COMMAND", process(f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
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
                await asyncio.wait_for(task, 5)
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
    code = "import time, atoll.server.views.view_process as v; v.History = lambda *_: time.sleep(60); v.main()"

    async def main() -> None:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE)
        assert child.stdin is not None
        child.stdin.write(b'{"state": "x", "database": ""}\n')
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(child.wait(), 2)
        child.stdin.close()  # as the kernel does when the coordinator is killed
        assert await asyncio.wait_for(child.wait(), 10) == view_process.EXIT_UNUSABLE

    run(main())


@pytest.mark.usefixtures("cold_start")
def test_text_goes_as_utf_8_wherever_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    code = (
        "import atoll.server.views.view_process as v; v.History = lambda *_: 0; "
        "v.look = lambda *_: 'h\\u00e4fen'; v.main()"
    )
    monkeypatch.setattr(view_process, "COMMAND", (sys.executable, "-c", code))
    assert asyncio.run(seen(Viewer(tmp_path))).decode() == '"h\u00e4fen"'
