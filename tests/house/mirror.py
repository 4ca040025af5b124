"""The folders of the tests beside the rooms that they test."""

from collections.abc import Iterable, Mapping

from tests.house.tree import TESTS, Fault, Module


def mirrored(folder: str) -> tuple[str, str]:
    """Return the two places of a folder's tests: `a/b` has the folder `tests/a/b` or the file `tests/a/test_b.py`."""
    above, _, name = folder.removeprefix("atoll/").rpartition("/")
    inside = f"{TESTS}/{above}" if above else TESTS
    return f"{inside}/{name}", f"{inside}/test_{name}.py"


def missing_tests(shipped: Iterable[Module], tests: Iterable[Module], elsewhere: Mapping[str, str]) -> list[Fault]:
    """Report folders of shipped code without a place of tests, and exceptions that are wrong or not needed."""
    places = {place for module in tests for place in (module.path, *_folders_above(module.path))}
    folders = {module.folder for module in shipped}
    without = {folder for folder in folders if folder != "atoll" and not places.intersection(mirrored(folder))}
    faults = [
        Fault(folder, 0, f"has neither {' nor '.join(mirrored(folder))}") for folder in sorted(without - set(elsewhere))
    ]
    for folder, place in elsewhere.items():
        if place not in places:
            faults.append(Fault(folder, 0, f"its tests are not in {place}"))
        elif folder not in without:
            faults.append(Fault(folder, 0, "is no exception: remove it from TESTS_ELSEWHERE"))
    return faults


def _folders_above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
