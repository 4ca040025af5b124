"""The folders of the tests beside the rooms that they test."""

from collections.abc import Iterable
from pathlib import PurePosixPath

from tests.house.tree import TESTS, Fault, Module

ELSEWHERE = {
    "atoll/cli/flower": "tests/federation/flower",
    "atoll/cli/project": "tests/cli/test_new.py",
    "server/services": "tests/wire",
    "server/transfers": "tests/wire",
}
"""Folders whose tests lie elsewhere: what they do is seen through a socket, a process or a whole history."""


def missing_tests(shipped: Iterable[Module], tests: Iterable[Module]) -> list[Fault]:
    """Report folders `a/b` of shipped code with neither `tests/a/b` nor `tests/a/test_b.py`."""
    places = {str(place) for module in tests for place in (module.path, *PurePosixPath(module.path).parents)}
    faults = []
    for folder in sorted({module.folder for module in shipped} - {"atoll"}):
        above, _, name = f"{TESTS}/{folder.removeprefix('atoll/')}".rpartition("/")
        mirrored = [ELSEWHERE[folder]] if folder in ELSEWHERE else [f"{above}/{name}", f"{above}/test_{name}.py"]
        if places.isdisjoint(mirrored):
            faults.append(Fault(folder, 0, f"has no tests in {' or '.join(mirrored)}"))
    return faults
