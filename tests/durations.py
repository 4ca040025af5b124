"""The order of the test files: the longest first, so that the processes of `make test` end at the same time.

    python -m pytest -p tests.durations -p tests.workers --workers 2    # as `make test`

`durations.json` has the seconds of each file that takes at least one; `make durations` refreshes it. A file that is not
there comes last.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest

STORE = Path(__file__).with_suffix(".json")

LONG_S = 15.0
"""About the seconds of a test with the marker `long`, which `make durations` does not run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes the durations down."""
    parser.addoption("--store-durations", action="store_true", help=f"write the seconds of each file to {STORE.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Register the measurement in the process that hears of all tests."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config.getoption("--store-durations")), "atoll-durations")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files by their durations; the tests of a file stay in its order."""
    known: defaultdict[str, float] = defaultdict(float, json.loads(STORE.read_text("utf-8")))
    for item in items:
        known[file_of(item.nodeid)] += LONG_S * (item.get_closest_marker("long") is not None)
    items.sort(key=lambda item: (-known[file_of(item.nodeid)], file_of(item.nodeid)))


def file_of(test: str) -> str:
    """Return the file of a test, relative to the root."""
    return test.partition("::")[0]


class Durations:
    """The seconds of a run, by file and by process.

    Args:
        stores: whether they are written down at the end.
    """

    def __init__(self, stores: bool) -> None:
        self._stores = stores
        self._of_files: defaultdict[str, float] = defaultdict(float)
        self._of_processes: defaultdict[int, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the duration of a test, its setup or its teardown."""
        self._of_files[file_of(report.nodeid)] += report.duration
        self._of_processes[getattr(report, "worker", 0)] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print how evenly the processes shared the work."""
        shares = [f"{seconds:.0f} s" for _, seconds in sorted(self._of_processes.items())]
        terminalreporter.write_line(f"tests ran for: {', '.join(shares)}")

    def pytest_sessionfinish(self) -> None:
        """Write the durations down."""
        if self._stores:
            of_files = {name: round(seconds) for name, seconds in sorted(self._of_files.items()) if round(seconds)}
            STORE.write_text(json.dumps(of_files, indent=1) + "\n", "utf-8")
