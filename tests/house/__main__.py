"""`python -m tests.house`: structure and style of the shipped code; exit code 1 when a bound is broken.

python -m tests.house                          # the report, with the first faults of each check
python -m tests.house --full                   # with all faults
python -m tests.house --words server/rounds docs/policy.md    # only the style, of these files and folders
python -m tests.house --propose server         # floors of a room from its imports, for tests/house/floors.py
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.house import floors, report, sizes
from tests.house.imports import Edge, edges, folder_circles, module_circles, room_levels
from tests.house.mirror import missing_tests
from tests.house.propose import proposal
from tests.house.report import Check
from tests.house.style import docstrings, pages
from tests.house.tree import AROUND, ROOMS, ROOT, TESTS, Fault, Module, collector_paused, python_files, read, read_files
from tests.house.upward import House, missing_places, upward_imports

STYLE_SHOWN = 5
"""Breaks of the style that the report lists of each kind; `--words` lists all."""

HOUSE = House(floors.FLOORS, floors.MAY_IMPORT, floors.TESTS_ELSEWHERE)


@dataclass(frozen=True)
class Sources:
    """All files, each read once: the shipped code, what lies around it, and the tests."""

    root: Path
    shipped: Sequence[Module]
    around: Sequence[Module]
    tests: Sequence[Module]

    @classmethod
    def of(cls, root: Path) -> "Sources":
        """Read the files below a root."""
        return cls(root, read(root, ROOMS), read(root, AROUND), read(root, [TESTS]))


def main(arguments: Sequence[str] | None = None, root: Path = ROOT, house: House = HOUSE) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.house", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="list every fault, not only the first of each check")
    parser.add_argument("--all", action="store_true", help="show the style of the tests too, for information")
    parser.add_argument("--words", nargs="*", metavar="PATH", help="only the style, by default of everything")
    parser.add_argument("--propose", choices=ROOMS, metavar="ROOM", help="propose the floors of a room")
    with collector_paused():
        return _run(parser.parse_args(arguments), root, house)


def _run(given: argparse.Namespace, root: Path, house: House) -> int:
    if given.words is not None:
        return _words(root, given.words)
    if given.propose is not None:
        modules = read(root, [given.propose])
        print(proposal(house, given.propose, [module.path for module in modules], edges(modules)))
        return 0
    checks = all_checks(Sources.of(root), house, with_tests=given.all)
    print(report.rendered(checks, is_full=given.full))
    return 0 if all(check.is_ok for check in checks) else 1


def all_checks(sources: Sources, house: House, *, with_tests: bool = False) -> list[Check]:
    """Return every check, in the order of the table."""
    every = [*sources.shipped, *sources.around, *sources.tests]
    found = edges(every)
    inside = [edge for edge in found if edge.importer.split("/", 1)[0] in ROOMS]
    return [
        *_size_checks(sources),
        *(Check(f"import levels, {room}", room_levels(inside, room)) for room in ROOMS),
        _counted("import circles between modules", module_circles(found)),
        *_floor_checks(sources, inside, house),
        *_style_checks(sources, with_tests=with_tests),
    ]


def _counted(name: str, faults: Sequence[Fault]) -> Check:
    return Check(name, len(faults), 0, faults)


def _style(name: str, faults: Sequence[Fault], *, bound: int | None = 0, paths: str = "") -> Check:
    return Check(name, len(faults), bound, faults, more=f"all of them: --words {paths}".rstrip(), shown=STYLE_SHOWN)


def _size_checks(sources: Sources) -> list[Check]:
    shipped = sources.shipped
    longest = max((module.lines for module in shipped), default=0)
    return [
        _files_check("files per folder", shipped),
        _files_check("files per folder, tests", sources.tests),
        Check("longest file", longest, sizes.LINES_PER_FILE, sizes.long_files(shipped)),
        _counted(f"functions over {sizes.LINES_PER_FUNCTION} lines", sizes.long_functions(shipped)),
        _counted(f"functions with more than {sizes.PARAMETERS} parameters", sizes.wide_functions(shipped)),
    ]


def _files_check(name: str, modules: Sequence[Module]) -> Check:
    fullest = max(sizes.files_per_folder(modules).values(), default=0)
    return Check(name, fullest, sizes.FILES_PER_FOLDER, sizes.full_folders(modules))


def _floor_checks(sources: Sources, inside: Sequence[Edge], house: House) -> list[Check]:
    paths = [module.path for module in sources.shipped]
    places = {path: house.place(path) for path in paths}
    untested = missing_tests(sources.shipped, sources.tests, house.tests_elsewhere)
    return [
        _counted("import circles between folders", folder_circles([e for e in inside if e.imported in places], places)),
        _counted("upward imports", upward_imports(house, inside)),
        _counted("places that differ from the table of floors", missing_places(house, paths, inside)),
        _counted("folders without tests of their own", untested),
    ]


def _style_checks(sources: Sources, *, with_tests: bool) -> list[Check]:
    in_code = docstrings.faults([*sources.shipped, *sources.around])
    texts = [(page.relative_to(sources.root).as_posix(), page.read_text("utf-8")) for page in pages.pages(sources.root)]
    in_pages = [fault for path, text in texts for fault in pages.faults(path, text)]
    checks = [
        _style("banned turns in docstrings", in_code),
        _style("banned turns in the documentation", in_pages, paths="docs *.md"),
    ]
    if with_tests:
        in_tests = docstrings.faults(sources.tests)
        checks.append(_style("banned turns in the tests' docstrings", in_tests, bound=None, paths=TESTS))
    return checks


def _words(root: Path, given: Sequence[str]) -> int:
    """Print the breaks of the style below some files and folders, in the order of their lines."""
    root = root.resolve()
    everything = [*(root / room for room in (*ROOMS, *AROUND)), *pages.pages(root)]
    wanted = [(root / path).resolve() for path in given] or everything
    absent = [path for path in wanted if not path.exists() or not path.is_relative_to(root)]
    if given and absent:
        print(*(f"{path}: no such file or folder of the repository" for path in absent), sep="\n", file=sys.stderr)
        return 2
    modules = read_files(root, (path for place in wanted for path in python_files(place)))
    texts = [page for place in wanted for page in pages.pages_at(place)]
    faults = docstrings.faults(modules)
    for page in texts:
        faults += pages.faults(page.relative_to(root).as_posix(), page.read_text("utf-8"))
    for fault in sorted(faults):
        print(fault)
    print(f"{len(faults)} in {_counted_as(len(modules), 'Python file')} and {_counted_as(len(texts), 'page')}")
    return 1 if faults else 0


def _counted_as(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


if __name__ == "__main__":
    sys.exit(main())
