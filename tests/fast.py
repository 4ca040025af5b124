"""The fast tests: which they are, and the guard of `make test-fast`, under which one that acts fails.

    python -m pytest -p tests.fast -m "not real and not slow"    # as `make test-fast`
    python -m pytest -p tests.fast --real-list FILE              # writes down which tests act

A test acts when it starts a process, opens a port or sleeps. It then has the marker `real`: by the table `REAL` of
folders and files, none of which `make test-fast` imports, or by `@pytest.mark.real` in a file that has others.

A property is tried on `NUM_EXAMPLES` at most; `make test` tries it on the number that it names, or on fifty.
"""

import asyncio
import multiprocessing.process
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

REAL = (
    "benchmarks/papers/test_tables.py",
    "benchmarks/test_codecs.py",
    "benchmarks/test_collectives.py",
    "benchmarks/test_quick.py",
    "cli/exports/test_killed.py",
    "cli/runs/test_elsewhere.py",
    "cli/runs/test_showing.py",
    "cli/test_imports.py",
    "cli/test_shutdown_deadline.py",
    "cli/test_signals.py",
    "cli/test_waiting.py",
    "client/test_agent.py",
    "client/test_codecs.py",
    "client/test_messages.py",
    "client/test_policy.py",
    "client/test_process.py",
    "client/test_proxy.py",
    "client/test_review.py",
    "client/test_signed.py",
    "client/wire/test_part_uploads.py",
    "client/wire/test_ranks.py",
    "client/wire/test_rotating_channel.py",
    "client/wire/test_transfers.py",
    "client/work",
    "dashboard/browser",
    "examples/teaching/test_collectives.py",
    "examples/teaching/test_horovod.py",
    "examples/test_algorithms.py",
    "examples/test_tumours.py",
    "federation",
    "flower/hosted/test_grid.py",
    "interface/test_importing.py",
    "interface/test_in_a_notebook.py",
    "messages",
    "odd_tasks",
    "pages/test_notebooks.py",
    "pages/test_sessions.py",
    "parallel/checkpoint/test_checkpointer.py",
    "parallel/checkpoint/test_engine.py",
    "parallel/checkpoint/test_export.py",
    "parallel/checkpoint/test_resharding.py",
    "parallel/communication/test_hooks.py",
    "parallel/communication/test_outer.py",
    "parallel/data/test_ranks.py",
    "parallel/engine/test_agreement.py",
    "parallel/engine/test_collectives.py",
    "parallel/engine/test_equality.py",
    "parallel/engine/test_forked.py",
    "parallel/engine/test_step.py",
    "parallel/engine/test_traffic.py",
    "parallel/launch/test_launcher.py",
    "parallel/launch/test_line.py",
    "parallel/mesh_client/supervisor/test_crew.py",
    "parallel/planner/test_dry_run.py",
    "parallel/trainer/test_based.py",
    "parallel/trainer/test_on_ranks.py",
    "parts",
    "protocol/wire/test_stream.py",
    "server/following/test_stream.py",
    "server/hosting/test_custom_codecs.py",
    "server/hosting/test_message_driver.py",
    "server/identity/test_enrolments.py",
    "server/identity/test_guard.py",
    "server/identity/test_setup.py",
    "server/journal/test_earlier_state.py",
    "server/journal/test_postgres.py",
    "server/names/test_refusals.py",
    "server/programs/test_process.py",
    "server/ranks/test_process.py",
    "server/transport/test_server_credentials.py",
    "server/transport/test_shutdown.py",
    "server/views/test_view_process.py",
    "simulations/engines/processes",
    "simulations/experiments/test_sweep.py",
    "telemetry/test_agent_spans.py",
    "telemetry/test_endpoint.py",
    "telemetry/test_export.py",
    "telemetry/test_scrape.py",
    "test_packaging.py",
    "test_readme.py",
    "test_reaper.py",
    "training/optimizers/test_in_engine.py",
    "training/optimizers/test_sharded.py",
    "training/worker/test_process.py",
    "wire",
)
"""Folders and files of which all tests, or nearly all, act."""

NUM_EXAMPLES = 15
"""The most examples of a property."""

TESTS = Path(__file__).parent
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
            raise AssertionError(self.fault)

    @property
    def fault(self) -> str:
        """The sentence about a fast test that acts."""
        what = ", ".join(sorted(self.seen))
        return f"{what} in a fast test: mark it `real`, or put its file into REAL of tests/fast.py"


ACTS = Acts()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes down which tests act."""
    parser.addoption("--real-list", metavar="FILE", help="write the tests that start a process, open a port or sleep")


def pytest_configure(config: pytest.Config) -> None:
    """Install the guard, once for the process."""
    ACTS.is_strict = not config.getoption("--real-list")
    if ACTS.is_strict:
        settings.register_profile("fast", settings.default, max_examples=NUM_EXAMPLES)
        settings.load_profile("fast")
        setattr(settings, "__init__", _bounded(settings.__init__))  # noqa: B010 - typed as a method
    sys.addaudithook(_on_event)
    time.sleep = _noting(time.sleep, "a sleep", lambda seconds, *_: seconds > 0)
    asyncio.sleep = _noting(asyncio.sleep, "a sleep", lambda seconds, *_: seconds > 0)
    import grpc.aio

    for module, names in ((grpc, ("server", "insecure_channel", "secure_channel")), (grpc.aio, ("server",))):
        for name in names:
            setattr(module, name, _noting(getattr(module, name), "a port of gRPC", lambda *_: True))
    process = multiprocessing.process.BaseProcess
    setattr(process, "start", _noting(process.start, "a process", lambda *_: True))  # noqa: B010 - typed as a method


@cache  # of a path for each test
def is_real(path: Path) -> bool:
    """Return whether all tests of a folder or file have the marker `real`, by the table."""
    begin = f"{path}/"
    return any(begin.startswith(f"{TESTS}/{entry}/") for entry in REAL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, without an import, what is real throughout."""
    return True if ACTS.is_strict and is_real(collection_path) else None


def _noting(call: Callable[..., Any], what: str, is_act: Callable[..., bool]) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        if is_act(*args, *kwargs.values()):
            ACTS.note(what)
        return call(*args, **kwargs)

    return noted


def _bounded(initialise: Callable[..., None]) -> Callable[..., None]:
    def bounded(*args: Any, max_examples: Any = NUM_EXAMPLES, **kwargs: Any) -> None:
        initialise(*args, max_examples=min(max_examples, NUM_EXAMPLES), **kwargs)

    return bounded


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that acted, also where its code took the guard's word for an error of the network."""
    yield
    if ACTS.is_strict and ACTS.seen:
        raise AssertionError(ACTS.fault)
