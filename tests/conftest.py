"""What all tests share."""

import ctypes
import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from benchmarks import reaper
from tests import fast, turns
from tests.validation import validate_machines
from tests.warm import start

if TYPE_CHECKING:
    from tests import postgresql

reaper.watch()  # what a test has started ends with this process, also when that is killed

# A shell lets what it starts in the background ignore Ctrl-C, which every process of a test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported, and for whatever is started: tests run beside each other, and threads of several processes
# that wait for each other on the same cores take four times as long as one thread of each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

start.install()  # with these variables

gc.disable()  # until all tests are collected: a million objects that stay

# No example fails because the machine is busy. On a build machine a property is tried on the same examples each time;
# elsewhere every run looks further, so that fifty do where nothing else is said.
settings.register_profile("suite", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("build", settings.get_profile("suite"), derandomize=True)
settings.load_profile("build" if os.environ.get("CI") else "suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `real` the tests of the table, and those that use the PostgreSQL server."""
    for item in items:
        if fast.is_real(item.path) or "postgres_server" in getattr(item, "fixturenames", ()):
            item.add_marker("real")


def pytest_collection_finish() -> None:
    """Exclude the modules and tests, a million objects, from all garbage collections.

    A simulated run begins with a collection and ends with an unfreeze, which would let the next one traverse them all.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    vars(gc)["unfreeze"] = lambda: None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what passed tests have measured (`record_property("said", ...)`), also in processes of pytest-xdist.

    The day repeats the turns of this run.
    """
    terminalreporter.write_line(f"turns: {turns.VARIABLE}={turns.DAY}")
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "said":
                terminalreporter.write_line(str(value))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let what a test has printed be text: the processes that run tests beside each other send it to the first one."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(autouse=True, scope="module")
def memory_is_returned() -> Iterator[None]:
    """Return the memory of a file's tests to the system, which the C library would keep for this process."""
    yield
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


@pytest.fixture(autouse=True, scope="session")
def ranks_end_with_the_tests() -> Iterator[None]:
    """End the ranks that tests share (`tests/parallel/ranks.py`)."""
    yield
    if "tests.parallel.ranks" in sys.modules:
        sys.modules["tests.parallel.ranks"].SHARED.end()


@pytest.fixture(autouse=True)
def no_log_to_a_closed_stream() -> Iterator[None]:
    """A command that a test calls in this process logs to the stream of that test, which is closed when it ends."""
    _forget_logs()
    yield
    _forget_logs()


@pytest.fixture(autouse=True)
def invariants_after_every_event() -> None:
    """Let the machines of the coordinator check themselves (`validate()`) wherever a test drives one."""
    validate_machines()


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """Refuse a test that leaves torch's default process group behind: the next test would use it instead of its own."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("this test left a process group behind")


def _forget_logs() -> None:
    for handler in list(logging.root.handlers):
        is_closed = getattr(getattr(handler, "stream", None), "closed", False)
        if is_closed or type(handler).__module__ == "atoll.cli.log":
            logging.root.removeHandler(handler)


@pytest.fixture
def cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands of a test begin by an exec."""
    monkeypatch.setenv(start.COLD, "1")


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than `tmp_path`: in shared memory."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has no second file system in /dev/shm: let TMPDIR be on a disk")
    with tempfile.TemporaryDirectory(dir=memory, prefix="atoll-test-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def postgres_server() -> "Iterator[postgresql.Server]":
    """A server of PostgreSQL, up; whoever stops it starts it again."""
    pytest.importorskip("psycopg", reason="the driver is not installed: pip install -c constraints.txt -e '.[dev]'")
    from tests import postgresql

    programs = postgresql.programs()
    if programs is None:
        pytest.skip(postgresql.WANTED)
    server = postgresql.Server(programs)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def schema_url(postgres_server: "postgresql.Server") -> str:
    """Of an empty schema."""
    return postgres_server.url(postgres_server.new_schema())


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.real)])
def database_url(request: pytest.FixtureRequest) -> str:
    """Of each kind of database that a state directory may have; empty: its own file."""
    return "" if request.param == "sqlite" else request.getfixturevalue("schema_url")
