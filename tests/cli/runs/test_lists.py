"""Lists of any length: what the commands and the Python interface print of them, and what they refuse."""

import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import atoll
from atoll.server.journal.state_directory import StateDirectory
from benchmarks.views import build
from tests.cli.invoking import invoke, refused, said, shown


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ended run of 1,100 rounds and 60 members."""
    folder = tmp_path_factory.mktemp("lists") / "state"
    build(folder, 60, 1_100)
    return folder


def rounds(state: Path, *options: str) -> list[int]:
    return [row["round"] for row in shown("round", "list", *options, "--state", state)]


@pytest.mark.parametrize(
    ("options", "numbers", "note"),
    [
        ((), range(101, 1101), "these are the newest 1,000; earlier rounds: --after 0, or a larger --last"),
        (("--last", "3"), range(1098, 1101), ""),
        (("--last", "5000"), range(1, 1101), ""),
        (("--after", "0"), range(1, 1001), "more rounds follow: --after 1000"),
        (("--after", "1000"), range(1001, 1101), ""),
        (("--after", "1090", "--last", "20"), range(1091, 1101), ""),
        (("--after", "1090", "--last", "3"), range(1098, 1101), ""),
        (("--after", "1100"), range(0), "run many-1 has no such round"),
        (("--fate", "lost", "--last", "2"), (1050, 1100), ""),
        (("--client", "client-0000003", "--after", "0"), range(1, 1101, 20), ""),
        (("--client", "client-0000000", "--fate", "lost"), range(100, 1101, 100), ""),
    ],
)
def test_the_wanted_rounds_are_printed_and_the_others_named(
    state: Path, options: tuple[str, ...], numbers: Any, note: str
) -> None:
    assert rounds(state, *options) == list(numbers)
    told = invoke("round", "list", *options, "--state", str(state)).stderr
    assert (note in told) if note else not told


def test_versions_are_listed_like_rounds(state: Path) -> None:
    versions = [row["version"] for row in shown("model", "list", "--last", "2", "--state", state)]
    assert versions == [1099, 1100]
    assert len(shown("model", "list", "--state", state)) == 1000


def test_clients_are_listed_by_page_by_prefix_and_by_state(state: Path) -> None:
    def names(*options: str) -> list[str]:
        return [row["client"][-2:] for row in shown("client", "list", *options, "--state", state)]

    assert names("--count", "3") == ["00", "01", "02"]
    assert names("--count", "3", "--after", "client-0000057") == ["58", "59"]
    assert names("--prefix", "client-000001") == [f"1{last}" for last in range(10)]
    assert names("--only", "failed", "--count", "2") == ["00", "05"]
    assert names("--only", "connected") == []
    assert len(names("--only", "away")) == len(names()) == 60
    told = invoke("client", "list", "--count", "3", "--state", str(state)).stderr
    assert "more clients follow: --after client-0000002" in told
    assert "client-0000059" in said("client", "list", "--state", state)


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (("round", "list", "--last", "0"), "got 0; allowed: at least 1"),
        (("round", "list", "--after", "-1"), "got -1; allowed: at least 0"),
        (("round", "list", "--after", "x"), "'x' is not a valid integer"),
        (("round", "list", "--fate", "sad"), "fate: got 'sad'; allowed: waiting, joined"),
        (("client", "list", "--count", "0"), "got 0; allowed: at least 1, at most 1000"),
        (("client", "list", "--count", "1001"), "got 1001; allowed: at least 1, at most 1000"),
        (("client", "list", "--only", "gone"), "state: got 'gone'; allowed: connected, away, failed"),
        (("model", "list", "--last", "no"), "'no' is not a valid integer"),
    ],
)
def test_what_cannot_be_a_page_is_refused(state: Path, command: tuple[str, ...], fault: str) -> None:
    result = invoke(*command, "--state", state)
    assert result.exit_code == 2
    assert fault in " ".join(re.sub("[│─╭╮╰╯]", " ", result.stderr).split())


@pytest.mark.parametrize(
    ("version", "fault"),
    [("5", "has schema version 5, this Atoll knows up to 4"), ("3", "the views of this Atoll need 4")],
)
def test_a_database_of_another_version_is_refused(tmp_path: Path, version: str, fault: str) -> None:
    with StateDirectory.open(tmp_path / "state") as opened, opened.database.transaction() as connection:
        connection.execute(text(f"UPDATE meta SET value = '{version}' WHERE key = 'schema_version'"))
    assert fault in " ".join(refused("round", "list", "--state", tmp_path / "state"))


def test_the_python_interface_reads_whole_lists(state: Path) -> None:
    run = atoll.connect(state).run("many")
    assert [row["round"] for row in run.rounds] == list(range(1, 1101))
    assert len(run.versions) == 1100
    assert len(run.clients) == 60
    assert sum(row["invited"] for row in run.clients) == 3300
    assert "<td>1100</td>" in run._repr_html_()
