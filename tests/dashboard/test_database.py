"""A database as a place: its runs and members, whatever folder is here, and its password nowhere."""

import logging
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from starlette.testclient import TestClient

from atoll.dashboard.sources import sources
from atoll.interface.errors import AtollError
from atoll.interface.places import place
from atoll.protocol.vocabulary import Version
from atoll.server.journal.journal import Journal
from atoll.server.journal.rows import Batch, EvaluationRow
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.views.history import History
from atoll.server.views.thinning import POINTS_MAX
from atoll.server.views.views import View, look
from benchmarks.pages import crawled
from tests.dashboard.test_control import Browser
from tests.dashboard.test_process import dashboard, get
from tests.process_table import descendants
from tests.server.views.test_history import IN_ROUND_4, write_history
from tests.waiting import BOUND_S

if TYPE_CHECKING:
    from tests.postgresql import Server

PASSWORDS = ("s3cret/of:tests", "s3cret%2Fof%3Atests", "s3cret")


@pytest.fixture
def url(postgres_server: "Server", tmp_path: Path) -> str:
    """The URL, with a password, of a database whose state directory is elsewhere."""
    schema = postgres_server.new_schema()
    with StateDirectory.open(tmp_path / "elsewhere", database=postgres_server.url(schema)) as state:
        write_history(state, IN_ROUND_4)
    (tmp_path / "elsewhere").rename(tmp_path / "away")
    return postgres_server.tcp_url(schema)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the state directory of another coordinator, which no page may show."""
    folder = tmp_path / "here"
    with StateDirectory.open(folder / "atoll-state") as state:
        write_history(state)
    (folder / "atoll-state" / "statistics").mkdir()
    (folder / "atoll-state" / "statistics" / "000001.json").write_text('{"number": 1, "foreign": true}')
    monkeypatch.chdir(folder)
    return folder


def has_password(text: str) -> bool:
    return any(password in text for password in PASSWORDS)


def read(client: TestClient, address: str) -> str:
    answer = client.get(address)
    assert answer.status_code == 200, (address, answer.text)
    return unescape(answer.text)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_each_page_is_of_the_database_and_none_has_its_password(
    url: str, here: Path, caplog: pytest.LogCaptureFixture, scheme: str
) -> None:
    caplog.set_level(logging.DEBUG)
    client = Browser([url.replace("postgresql", scheme, 1)], is_controlled=True).client
    addresses = crawled(lambda address: read(client, address).encode())
    assert {"/runs/1/r", "/members/1", "/audit/1", "/statistics/1", "/alerts/1", "/runs/1/r/versions"} <= set(addresses)
    for address in addresses:
        page = read(client, address)
        beside = (
            "/runs.json"
            if address == "/"
            else address.replace("?", ".json?", 1)
            if "?" in address
            else f"{address}.json"
        )
        assert not has_password(page + client.get(beside).text + str(client.get(beside).headers)), address
    assert not has_password(caplog.text)
    assert "collecting" in read(client, "/runs/1/r/rounds"), "the open round of the database"
    for address, what in (("/audit/1", "an audit log"), ("/statistics/1", "results of statistics")):
        assert f"a database does not have {what}" in read(client, address)
    assert client.get("/members/1.json").json() == []
    assert {row["kept"] for row in client.get("/runs/1/r/versions.json").json()} == {None}
    for address in ("/runs/1/r", "/members/1"):
        assert "/control" not in read(client, address)
        assert client.get(f"{address}/control").status_code == 404


def test_a_coordinator_elsewhere_is_not_said_to_have_lost_its_clients(
    url: str, here: Path, postgres_server: "Server", tmp_path: Path
) -> None:
    runs = place(url)
    federation = sources([url])[0].federation()
    at_rest = {row["client"]: row["connected"] for row in federation.known_run("r").clients}
    assert set(at_rest.values()) == {False}
    (tmp_path / "away").rename(tmp_path / "elsewhere")
    with StateDirectory.open(tmp_path / "elsewhere"):  # holds the database, as a coordinator does
        (tmp_path / "elsewhere").rename(tmp_path / "away")
        served = {row["client"]: row["connected"] for row in federation.known_run("r").clients}
    assert any(served.values())
    assert "s3cret" not in repr(runs)


def test_curves_are_the_same_from_both_databases(postgres_server: "Server", tmp_path: Path) -> None:
    rows = [
        EvaluationRow("r", Version(number), source, {"loss": (number, 2.0)}, 1, "", 1.0, values)  # type: ignore[arg-type]
        for number in range(2, POINTS_MAX + 10)
        for source, values in (("server", {}), ("clients", {"loss": float(number % 7)}), ("site:a", {"loss": 9.0}))
    ]
    found = []
    for database in ("", postgres_server.url(postgres_server.new_schema())):
        folder = tmp_path / str(bool(database))
        with StateDirectory.open(folder, database=database) as state:
            write_history(state)
            Journal(state).commit(Batch(evaluations=rows[::-1]))
        found.append(look(History(folder, database), View.RUN, "r")["document"]["metrics"])
    assert found[0] == found[1]
    assert (found[0]["9"]["server"], found[0]["9"]["clients"]) == ({"loss": 4.5}, {"loss": 2.0})
    assert len(found[0]) <= 2 * POINTS_MAX


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("sqlite:///atoll-state/state.db", "got 'sqlite:///atoll-state/state.db': allowed: postgresql://"),
        ("mysql://ann:s3cret@hub/atoll", "got 'mysql://ann@hub/atoll': allowed: postgresql://"),
        ("postgresql://ann:s3cret@x@hub/atoll", "must be written as %40"),
        ("postgresql://ann:a:s3cret@hub/atoll", "allowed before the database"),
    ],
)
def test_another_url_is_refused_at_the_start(where: str, why: str) -> None:
    with pytest.raises(AtollError) as refused:
        sources([where])
    assert why in str(refused.value)
    assert not has_password(str(refused.value))


def test_a_database_that_is_away_is_told_on_the_pages(here: Path) -> None:
    pytest.importorskip("psycopg")
    client = Browser(["postgresql://ann:s3cret@127.0.0.1:1/atoll", "atoll-state"], is_controlled=False).client
    page = read(client, "/")
    assert "cannot be reached" in page
    assert "atoll-state" in page
    for address in ("/runs/1/r", "/runs/1/r.json", "/members/1", "/runs/1/r/site?name=a"):
        answer = client.get(address)
        assert (answer.status_code, "cannot be reached" in answer.text) == (503, True), answer.text
        assert not has_password(answer.text)
    assert "AtollJournalAway" in read(client, "/alerts/1")


def test_a_process_logs_no_password_and_passes_none_on(url: str, here: Path) -> None:
    with dashboard(url, home=here) as (process, link):
        page = get(link, "/", get(link, link[link.index("/login") :])[1])[2]
        assert "postgresql://" in page
        family = descendants(process.pid)
        assert not [pid for pid in family if has_password(Path(f"/proc/{pid}/cmdline").read_text())]
        written = b"".join(path.read_bytes() for path in here.rglob("*") if path.is_file())
        process.terminate()
        out, err = process.communicate(timeout=BOUND_S)
    assert not has_password(out + err + page + written.decode("latin-1"))
