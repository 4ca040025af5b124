"""The guard of `make test-fast`: a fast test starts no process, opens no port and sleeps for no time.

    python -m pytest -p tests.fast -m "not real"     # as `make test-fast`
    python -m pytest -p tests.fast --real-list FILE  # writes down which tests act, for the table REAL below

A test that does one of these carries the marker `real`, by the table `REAL` of folders and files or by itself.
"""

import asyncio
import multiprocessing.process
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

ROOT = Path(__file__).parents[1]
EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "socket.bind", "socket.connect"})
"""The audit events of CPython that tell of a process or a port."""


class Acts:
    """What the current test does, as the interpreter's audit hooks and the patched calls report it."""

    def __init__(self) -> None:
        self.test = ""
        self.seen: set[str] = set()
        self.is_strict = False

    def note(self, what: str) -> None:
        """Record one act; a strict guard fails the test with it."""
        if not self.test:
            return
        self.seen.add(what)
        if self.is_strict:
            raise AssertionError(f"{what} in a fast test: mark it `real`, or put its file into REAL of tests/fast.py")


ACTS = Acts()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes down which tests act."""
    parser.addoption("--real-list", metavar="FILE", help="write the tests that start a process, open a port or sleep")


def pytest_configure(config: pytest.Config) -> None:
    """Install the guard, once for the process."""
    ACTS.is_strict = not config.getoption("--real-list")
    sys.addaudithook(_on_event)
    time.sleep = _noting(time.sleep, "a sleep", lambda seconds, *_: seconds > 0)
    asyncio.sleep = _noting(asyncio.sleep, "a sleep", lambda seconds, *_: seconds > 0)
    for module, names in ((grpc, ("server", "insecure_channel", "secure_channel")), (grpc.aio, ("server",))):
        for name in names:
            setattr(module, name, _noting(getattr(module, name), "a port of gRPC", lambda *_: True))
    process = multiprocessing.process.BaseProcess
    setattr(process, "start", _noting(process.start, "a process", lambda *_: True))  # noqa: B010 - typed as a method


def _noting(call: Callable[..., Any], what: str, is_act: Callable[..., bool]) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        if is_act(*args, *kwargs.values()):
            ACTS.note(what)
        return call(*args, **kwargs)

    return noted


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if event not in EVENTS or (event.startswith("socket.") and _is_of_the_loop(args)):
        return
    ACTS.note(event)


def _is_of_the_loop(args: tuple[Any, ...]) -> bool:
    """Whether a socket is no port of the network: a socket pair, or a file's name."""
    return not isinstance(args[1], tuple)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watch one test, its fixtures included."""
    ACTS.test, ACTS.seen = item.nodeid, set()
    try:
        return (yield)
    finally:
        if ACTS.seen and (path := item.config.getoption("--real-list")):
            with Path(path).open("a") as file:
                file.write(f"{item.nodeid}\t{', '.join(sorted(ACTS.seen))}\n")
        ACTS.test = ""
