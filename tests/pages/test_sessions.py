"""The shell blocks of the pages, executed in order by real processes in the state that each page begins with."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.processes import free_address
from tests.pages.blocks import EXAMPLES, PAGES, Block, blocks_of
from tests.pages.due import when_due
from tests.pages.given import GIVEN, Given
from tests.pages.shell import CommandFailed, Shell, lines_of, service_of
from tests.pages.world import begin_run, make_project
from tests.waiting import BOUND_S

EXECUTED_ELSEWHERE = "run"
"""The comment above the blocks that `tests/test_readme.py` executes together, with the outputs after them."""


def is_of_a_session(block: Block) -> bool:
    """Return whether a block is commands, or what they print."""
    return block.language == "bash" or block.is_output


def _executed(page: str) -> list[Block]:
    return [b for b in blocks_of(page) if b.language == "bash" and not b.reason and b.comment != EXECUTED_ELSEWHERE]


def _sessions() -> dict[str, list[Block]]:
    """Return the blocks of each session: of a page, or of a page from block N on (`PAGE#N`)."""
    found: dict[str, list[Block]] = {}
    for page in (*PAGES, *EXAMPLES):
        key = page
        for number, block in enumerate(_executed(page), 1):
            key = f"{page}#{number}" if f"{page}#{number}" in GIVEN else key
            found.setdefault(key, []).append(block)
    return found


SESSIONS = _sessions()
SHORT = [name for name in SESSIONS if not GIVEN[name].is_long]


class Worlds:
    """The folders in which pages begin: each is made once and copied for every session."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, free_address()

    def enter(self, page: str, given: Given, folder: Path) -> Shell:
        """Return a shell in a folder as the page's reader has it."""
        kind = "none" if given.run == "none" else "begun"
        source = self.folder / kind
        if not source.exists():
            make_project(source)
            if kind == "begun":
                begin_run(source, self.address)
        ignored = shutil.ignore_patterns(".logs", ".bin")
        shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True, ignore=ignored)
        tables = [block.text for block in blocks_of(page) if block.language in ("toml", "python")]
        for name, part in given.files.items():
            (folder / name).write_text(_local(next(text for text in tables if part in text), given))
        shell = Shell(folder, self.address)
        if given.run == "hosted":
            shell.run(
                "atoll coordinator --state atoll-state --set coordinator.keep_versions=1000",
                f"{page}: the coordinator of its reader",
            )
        return shell


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("worlds"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "reader"
    shutil.rmtree(tmp_path, ignore_errors=True)


def page_of(session: str) -> str:
    return session.partition("#")[0]


@pytest.mark.parametrize(
    "session",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in SESSIONS if GIVEN[name].is_long),
        *(when_due(name, page=page_of(name), number=number) for number, name in enumerate(SHORT)),
    ],
)
def test_every_command_of_a_page_does_what_the_page_says(
    session: str, worlds: Worlds, folder: Path, request: pytest.FixtureRequest
) -> None:
    blocks, given = SESSIONS[session], GIVEN[session]
    page = page_of(session)
    lines = [(block.place, line) for block in blocks for line in lines_of(block.text)]
    if any("ATOLL_DATA" in line for _, line in lines) and not os.environ.get("ATOLL_DATA"):
        pytest.skip("set ATOLL_DATA to the folder of public data sets (docs/data.md): then `make test` runs it")
    shell = worlds.enter(page, given, folder)
    if "$DATABASE" in given.instead.values():
        server = request.getfixturevalue("postgres_server")
        shell.variables["DATABASE"] = server.url(server.new_schema())
    try:
        for place, line in lines:
            for before in (b for part, lines in given.before.items() if line.startswith(part) for b in lines):
                shell.run(before, f"{place}, before it")
            shell.run(_local(line, given), place, given.codes.get(line, 0))
        shell.stop()
    finally:
        shell.kill()
    text = "\n".join([*(line for _, line in lines), *(block.text for block in blocks_of(page))])
    unused = [part for part in (*given.instead, *given.before, *given.codes) if part not in text]
    assert unused == [], "no command of the page has this any more"


def _local(line: str, given: Given) -> str:
    for part, other in given.instead.items():
        line = line.replace(part, other)
    return line


def test_the_state_of_every_session_is_written_down() -> None:
    assert sorted(GIVEN) == sorted(SESSIONS)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("atoll rund list", "ended with 2, not 0"),
        ("atoll coordinator nothing.toml", "ended with 2"),
        ("sleep 60", "does not end"),
        ("atoll coordinator run.toml --set round.deadline=1; exit 3", "ended with"),
    ],
)
def test_a_command_that_does_otherwise_is_noticed(line: str, words: str, tmp_path: Path) -> None:
    shell = Shell(tmp_path, free_address(), bound_s=5 if words == "does not end" else BOUND_S)
    try:
        with pytest.raises(CommandFailed, match=words):
            shell.run(line, "a.md:1")
    finally:
        shell.kill()


def test_a_block_is_split_into_its_commands() -> None:
    block = "for a in b c; do\n  echo $a   # twice\ndone\n$x\natoll agent t.py:t \\\n   --site n\n# no command\n"
    assert lines_of(block) == ["for a in b c; do\necho $a\ndone", "$x", "atoll agent t.py:t     --site n"]
    assert lines_of("$ atoll run list\nnothing\n$ atoll run show\n") == ["atoll run list", "atoll run show"]


def test_a_service_is_known_by_its_command() -> None:
    assert service_of("A=1 atoll agent t.py:t --site n") == "agent"
    assert service_of("atoll authority serve x --coordinator y") == "authority serve"
    assert [service_of(f"atoll {words}") for words in ("authority init x", "coordinator x --check", "run list")] == [
        None
    ] * 3
