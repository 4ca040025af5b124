"""Citations: every source that code, tests and pages name exists, in the repository or as a published paper.

`docs/architecture.md` is cited as "architecture, invariant 4" or "architecture, purity"; its tables of rooms and floors
are those of the contracts in `pyproject.toml`. Links and anchors of the pages are checked in `tests/test_docs.py`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.contracts import floors, may_import
from tests.house.tree import AROUND, ROOMS, TESTS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ARCHITECTURE = (DOCS / "architecture.md").read_text("utf-8")
SUFFIXES = {".py", ".md", ".proto", ".toml"}
NAMES = {"Makefile"}
ITSELF = "tests/test_citations.py"

FOLDERS = "|".join((*ROOMS, *AROUND, "docs", TESTS))
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*\.(?:py|md|proto|toml|json))`")
"""A file of the repository, in backticks."""

INVARIANTS = re.compile(r"[Ii]nvariants? (\d+(?:(?: to |, | and )\d+)*)")
SECTION = re.compile(r"\barchitecture, (?!invariant)([a-z][a-z ]*)")

GONE = {
    r"\bDESIGN\b": "the repository has no DESIGN",
    r"\bthe design(?:'s)?\b(?! of)": "the repository has no design document: cite docs/architecture.md",
    r"\.md,? section \d": "a page has no numbered sections: cite its title",
    r"\breference, section|\bof the reference\b|\bthe reference's\b": "the repository has no reference: cite the paper",
}
"""Sources that a reader of the repository cannot open, with what to cite in their place."""

NUMBERED = re.compile(r"\b[Ss]ections? \d")
SOURCE = re.compile(r"\b(?:19|20)\d\d\b|\bRFC \d|\barXiv")
"""What identifies a published source: its year, or the number of an RFC or a preprint."""


def title_words(page: str) -> list[str]:
    return [re.sub(r"[^a-z ]", "", title.lower()) for title in re.findall(r"^## (.*)$", page, re.MULTILINE)]


def rows(page: str, marker: str) -> list[list[str]]:
    """Return the cells of the table that follows `<!-- marker -->`, without its header."""
    table = re.search(rf"<!-- {marker} -->\n\n((?:\|.*\n)+)", page)
    assert table is not None, marker
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table[1].splitlines()[2:]]


def numbers(text: str) -> set[int]:
    """Return what "1 to 5 and 8" means: 1, 2, 3, 4, 5 and 8."""
    found = {int(number) for number in re.findall(r"\d+", text)}
    for first, last in re.findall(r"(\d+) to (\d+)", text):
        found |= set(range(int(first), int(last) + 1))
    return found


KNOWN_INVARIANTS = {int(number) for number in re.findall(r"^\| (\d+) \|", ARCHITECTURE, re.MULTILINE)}
KNOWN_SECTIONS = title_words(ARCHITECTURE)


def sources() -> list[Path]:
    """Return the text files of the repository; the links to the rooms lead to files that are there once."""
    below = {path.resolve() for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*")}
    paths = {path for path in {*below, *ROOT.iterdir()} if path.suffix in SUFFIXES or path.name in NAMES}
    return sorted(path for path in paths - {ROOT / ITSELF} if path.is_file())


def faults_of(name: str, text: str) -> Iterator[str]:
    """Yield every citation of a file that leads nowhere."""
    for pattern, advice in GONE.items():
        for found in re.finditer(pattern, text):
            yield f"{at(name, text, found)}: {advice}"
    if name.endswith((".py", ".md")):
        yield from faults_of_architecture(name, text)
        yield from faults_of_papers(name, text)
    for found in PATH.finditer(text) if name.endswith(".md") else ():
        if not (ROOT / found[1]).exists():
            yield f"{at(name, text, found)}: there is no {found[1]}"


def at(name: str, text: str, found: "re.Match[str]") -> str:
    return f"{name}:{1 + text.count(chr(10), 0, found.start())}: {found[0]!r}"


def faults_of_architecture(name: str, text: str) -> Iterator[str]:
    plain = re.sub(r"\s+", " ", text)
    is_named = (
        "architecture, invariant" in plain or name == "docs/architecture.md" or "architecture.md#invariants" in plain
    )
    for found in INVARIANTS.finditer(text):
        if absent := numbers(found[1]) - KNOWN_INVARIANTS:
            yield f"{at(name, text, found)}: docs/architecture.md has no invariant {sorted(absent)}"
        elif not is_named:
            yield f'{at(name, text, found)}: whose? cite it as "architecture, invariant N"'
    for found in SECTION.finditer(plain):
        if not any(found[1].startswith(title) for title in KNOWN_SECTIONS):
            yield f"{name}: {found[0]!r}: docs/architecture.md has {', '.join(KNOWN_SECTIONS)}"


def faults_of_papers(name: str, text: str) -> Iterator[str]:
    """Yield numbered sections without a source in their paragraph or table row."""
    for paragraph in re.split(r"\n\s*\n|\"\"\"", text):
        if (found := NUMBERED.search(paragraph)) and not SOURCE.search(paragraph):
            yield f"{name}: {found[0]!r} has no source: {' '.join(paragraph.split())[:80]!r}"


def test_every_citation_names_something_that_exists() -> None:
    found = [
        fault for path in sources() for fault in faults_of(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("server/x.py", '"""The rules of lateness are DESIGN section 4."""'),
        ("server/x.py", "# as the design's table has it"),
        ("server/x.py", '"""Keep architecture, invariant 10."""'),
        ("server/x.py", '"""Keep architecture, invariants 3 to 12."""'),
        ("server/x.py", '"""Keep invariant 3."""'),
        ("server/x.py", "# architecture, plumbing: see there"),
        ("tests/x.py", '"""Golden values of algorithms.md, section 1.7."""'),
        ("tests/x.py", '"""Section 1.7: two quadratics."""\n\nYEAR = 2021\n'),
        ("tests/x.py", "# the numbers of the reference, which agree"),
        ("docs/x.md", "The fold is in `aggregation/folding.py`."),
    ],
)
def test_a_citation_that_leads_nowhere_is_found(name: str, text: str) -> None:
    assert list(faults_of(name, text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("server/x.py", '"""Source: Bonawitz et al., "System Design", MLSys 2019, section 2.2."""'),
        ("server/x.py", '"""Keep architecture, invariants 1 to 5 and 8.\n\nInvariant 5 is checked here.\n"""'),
        ("server/x.py", "# architecture, from an event\n# to an effect: the journal comes first".replace("\n#", "\n")),
        ("server/x.py", "# the design of an experiment"),
        ("benchmarks/x.py", '"""One frame (RFC 9113, section 4.1)."""'),
        ("docs/x.md", "The fold is in `aggregation/fold/streaming.py`."),
    ],
)
def test_a_citation_of_what_is_there_is_allowed(name: str, text: str) -> None:
    assert list(faults_of(name, text)) == []


def test_the_nine_invariants_are_numbered_and_each_is_checked_by_files_that_exist() -> None:
    assert sorted(KNOWN_INVARIANTS) == list(range(1, 10))
    for line in re.findall(r"^\| \d \|.*$", ARCHITECTURE, re.MULTILINE):
        assert PATH.findall(line.rsplit("|", 2)[1]), line


def test_the_tables_of_rooms_and_floors_are_those_of_the_contracts() -> None:
    shown = {room.strip("`"): set(re.findall(r"`(\w+)`", allowed)) for room, _, allowed in rows(ARCHITECTURE, "rooms")}
    assert shown == {room: may_import(room) for room in ROOMS}
    for room, levels in rows(ARCHITECTURE, "floors"):
        folders = [[name for name in floor if is_folder(room.strip("`"), name)] for floor in floors(room.strip("`"))]
        assert [re.findall(r"`([^`]+)`", floor) for floor in levels.split(" < ")] == [f for f in folders if f] or [
            []
        ], room


def is_folder(room: str, name: str) -> bool:
    """Whether a name of a contract is a folder in a room, and no room itself."""
    return (ROOT / room / name).is_dir() and not (ROOT / room / name).is_symlink()


def test_the_index_has_every_page() -> None:
    index = (DOCS / "README.md").read_text("utf-8")
    linked = {(DOCS / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", index) if "://" not in target}
    assert sorted(page.relative_to(DOCS).as_posix() for page in {*DOCS.rglob("*.md")} - linked) == ["README.md"]


def test_the_decisions_are_numbered_and_have_their_four_parts() -> None:
    records = sorted((DOCS / "decisions").glob("*.md"))
    for number, record in enumerate(records, start=1):
        text = record.read_text("utf-8")
        assert record.name.startswith(f"{number:04}-"), record.name
        assert text.startswith(f"# {number}. "), record.name
        assert re.findall(r"^\*\*([A-Z][a-z ]+)\.\*\*", text, re.MULTILINE) == [
            "Context",
            "Decision",
            "Consequence",
            "What was tried",
        ], record.name
