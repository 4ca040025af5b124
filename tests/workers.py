"""Workers for the tests of a run: forks of one process, which has collected them once.

    python -m pytest -p tests.workers --workers 6

Six processes that import and collect on their own take 110 s of processor time for the same 12,000 tests, and the
memory six times. A worker is handed one file after another, in the order of the collection; those whose tests call
ranks go to two of the workers, while these have others. One that dies has failed the test that it was in; one that has
grown by `GROWTH_MB` ends after its file; a new fork takes its place.
"""

import logging
import os
import resource
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TextIO

import pytest

from benchmarks import reaper
from tests.warm import start

GROWTH_MB = 250
"""The growth of a worker since its fork [MB] after which it is replaced."""

OF_RANKS = ("tests/parallel/", "tests/odd_tasks/", "tests/training/optimizers/")
"""Folders whose tests call ranks. The fork server and four ranks of a worker (`parallel/ranks.py`) take 12 s."""

WITH_RANKS = 2
"""The number of workers beside each other that run the files of these folders first, and the others last."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of workers."""
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run the tests in N forks of this process")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests in workers, if any are asked for."""
    number = session.config.getoption("--workers")
    if not number or session.testsfailed or session.config.option.collectonly:
        return None
    workers = Workers(session, number)
    session.config.pluginmanager.register(workers, "atoll-workers")
    workers.run()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


class Workers:
    """The workers of a session, seen from the process that has collected.

    Args:
        session: after the collection.
        number: of workers beside each other.
    """

    def __init__(self, session: pytest.Session, number: int) -> None:
        self._session, self._number = session, number
        by_file = groupby(range(len(session.items)), key=lambda index: session.items[index].path)
        self._left = deque([*indices] for _, indices in by_file)
        self._workers: dict[Connection, _Worker] = {}
        self._started, self._peak_mb = 0, 0

    def run(self) -> None:
        """Run all tests; their reports go to the plugins of this process."""
        getattr(self._session.config, "_tmp_path_factory").getbasetemp()  # noqa: B009 - a folder of it for each
        try:
            while self._workers or (self._left and not self._is_over):
                while self._left and len(self._workers) < self._number and not self._is_over:
                    self._start()
                for pipe in wait(list(self._workers)):
                    assert isinstance(pipe, Connection)
                    self._hear(pipe)
        except BaseException:
            for worker in self._workers.values():
                os.kill(worker.pid, 9)
            raise

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what the largest worker has had in memory, the pages that all of them share included."""
        terminalreporter.write_line(f"{self._started} workers, the largest with {self._peak_mb} MB")

    @property
    def _is_over(self) -> bool:
        return bool(self._session.shouldfail or self._session.shouldstop)

    def _start(self) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of threads, which a collection has not started
            pid = os.fork()
        if not pid:
            for other in (ours, *self._workers):
                other.close()  # or it would not notice the end of this process
            _work(self._session, theirs, self._started)
        theirs.close()
        has_ranks = sum(worker.has_ranks for worker in self._workers.values()) < WITH_RANKS
        self._workers[ours] = _Worker(pid, self._started, has_ranks)
        self._started += 1

    def _take(self, worker: "_Worker") -> list[int]:
        """Take the next file of the worker's kind, or the next one."""
        file = next((file for file in self._left if self._calls_ranks(file) == worker.has_ranks), self._left[0])
        self._left.remove(file)
        return file

    def _calls_ranks(self, file: list[int]) -> bool:
        return self._session.items[file[0]].nodeid.startswith(OF_RANKS)

    def _hear(self, pipe: Connection) -> None:
        """Answer a worker, or notice its end."""
        worker, hook = self._workers[pipe], self._session.config.hook
        try:
            what, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            self._end(pipe, worker)
            return
        if what == "next":
            file = self._take(worker) if self._left and not self._is_over else None
            worker.files.extend([file] if file else [])
            pipe.send(file)
        elif what == "test":
            worker.test = value
            while worker.files and value not in worker.files[0]:
                worker.files.popleft()
        elif what == "report":
            report = hook.pytest_report_from_serializable(config=self._session.config, data=value)
            report.worker = worker.number
            hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
        elif what == "peak":
            self._peak_mb = max(self._peak_mb, value)
            worker.is_good = True

    def _end(self, pipe: Connection, worker: "_Worker") -> None:
        """Let the test of a worker that has died be failed, and another worker run what it has left."""
        del self._workers[pipe]
        pipe.close()
        _, status = os.waitpid(worker.pid, 0)
        if worker.is_good:
            return
        code = os.waitstatus_to_exitcode(status)
        if worker.test is None:
            raise RuntimeError(f"a worker ended before its first test, with exit code {code}")
        item, how = (
            self._session.items[worker.test],
            f"the process of the tests ended in this one, with exit code {code}",
        )
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", how, "call")
        vars(report)["worker"] = worker.number
        self._session.config.hook.pytest_runtest_logreport(report=report)
        file = worker.files.popleft()
        files = [file[file.index(worker.test) + 1 :], *worker.files]
        self._left.extendleft(reversed([file for file in files if file]))


class _Worker:
    """A worker, as its parent knows it.

    Args:
        pid: of its process.
        number: from 0.
        has_ranks: whether it prefers the files whose tests call ranks.
    """

    def __init__(self, pid: int, number: int, has_ranks: bool) -> None:
        self.pid, self.number, self.has_ranks = pid, number, has_ranks
        self.files: deque[list[int]] = deque()
        self.test: int | None = None
        self.is_good = False


def _work(session: pytest.Session, pipe: Connection, number: int) -> None:
    """Be a worker, and end this process."""
    code = 1
    try:
        _surround(session.config, pipe, number)
        for item, following in _pairs(session, pipe):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        pipe.send(("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _surround(config: pytest.Config, pipe: Connection, number: int) -> None:
    """Give this process its files, its watcher, its zygote, and its place for reports."""
    reaper.watch()
    start.install()
    capture = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()  # its files have the positions of those of all other workers
    capture.start_global_capturing()
    _log_to(sys.stderr)
    capture.suspend_global_capture(in_=False)
    factory = getattr(config, "_tmp_path_factory")  # noqa: B009
    base: Path = factory.getbasetemp() / f"worker-{number}"
    base.mkdir(mode=0o700)
    vars(factory)["_basetemp"] = base
    for name in ("terminalreporter", "terminalprogress"):
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    config.pluginmanager.register(_Reports(config, pipe), "atoll-worker")


def _log_to(stream: TextIO) -> None:
    """Give a stream to the loggers that have one of the collection, which is closed.

    Each line of Flower's would be a traceback else: 54 MB in one test.
    """
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and getattr(handler.stream, "closed", False):
                handler.stream = stream


class _Reports:
    """The plugin that sends the reports of a worker."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))


def _pairs(session: pytest.Session, pipe: Connection) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Yield each test with the one that follows, which says what of the fixtures is still needed."""
    before = _memory_mb()
    file = _next(pipe)
    while file:
        following: list[int] | None = None
        for place, index in enumerate(file):
            if place + 1 < len(file):
                after = file[place + 1]
            else:
                following = _next(pipe) if _memory_mb() < before + GROWTH_MB else None
                after = following[0] if following else -1
            pipe.send(("test", index))
            yield session.items[index], session.items[after] if after >= 0 else None
        file = following


def _next(pipe: Connection) -> list[int] | None:
    pipe.send(("next", None))
    answer: list[int] | None = pipe.recv()
    return answer


def _memory_mb() -> int:
    """Return what this process has in memory [MB]."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20
