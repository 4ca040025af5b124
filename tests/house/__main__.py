"""`python -m tests.house`: structure and words of the repository; exit code 1 where a rule is broken.

python -m tests.house                                         # all rules, warnings, lines by room and capability
python -m tests.house --words server/rounds docs/policy.md    # only the words, of these files and folders
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.house import contracts, lines, mirror, purity, sizes, words
from tests.house.tree import AROUND, ROOMS, ROOT, TESTS, Fault, Module, read

PAGES = ("README.md", "CONTRIBUTING.md", "docs")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.house", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--words", nargs="*", metavar="PATH", help="only the words, by default of everything")
    places = parser.parse_args(arguments).words
    if places is not None:
        return _words(root, places or [*ROOMS, *AROUND, *PAGES])
    shipped, around, tests = (read(root, places) for places in (ROOMS, AROUND, [TESTS]))
    for warning in sizes.warnings([*shipped, *around, *tests]):
        print(f"warning: {warning}")
    print(lines.table(shipped))
    found = [*faults(root, shipped, around, tests), *([broken] if (broken := contracts.broken(root)) else [])]
    print(*found, sep="\n") if found else print("no rule is broken")
    return 1 if found else 0


def faults(root: Path, shipped: list[Module], around: list[Module], tests: list[Module]) -> list[Fault]:
    """Return the violations of every rule but the contracts of imports."""
    return [
        *sizes.long_functions(shipped),
        *purity.faults(shipped),
        *mirror.missing_tests(shipped, tests),
        *words.in_docstrings([*shipped, *around]),
        *words.in_pages(root, [page for place in PAGES for page in words.pages_at(root / place)]),
    ]


def _words(root: Path, given: Sequence[str]) -> int:
    """Print the banned turns below some files and folders, in the order of their lines."""
    places = [(root / place).resolve() for place in given]
    if absent := [place for place in places if not place.exists() or not place.is_relative_to(root.resolve())]:
        print(*(f"{place}: no such file or folder of the repository" for place in absent), sep="\n", file=sys.stderr)
        return 2
    pages = [page for place in places for page in words.pages_at(place)]
    found = sorted(words.in_docstrings(read(root, given)) + words.in_pages(root.resolve(), pages))
    print(*found, f"banned turns: {len(found)}", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    gc.disable()  # all trees stay alive, and a collection would visit them again and again
    sys.exit(main())
