"""The rows of a run by pages: every row once, whatever the pages, and at one cost for small and for large runs."""

import math
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from atoll.protocol.paging import ALL, Paging
from atoll.protocol.vocabulary import RunId
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.views import clients, pages, views
from atoll.server.views.history import History
from atoll.server.views.views import View, look
from benchmarks.views import RUN, VIEWS, build
from tests.server.views.test_history import IN_ROUND_4, write_history


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> History:
    """An ended run of 1,200 members and 130 rounds, two of which were abandoned."""
    folder = tmp_path_factory.mktemp("views") / "state"
    build(folder, 1_200, 130)
    return History(folder)


def walked(history: History, view: View, paging: Paging, run: str = RUN) -> list[dict[str, Any]]:
    """Return the rows of all pages, in the order of reading."""
    found: list[dict[str, Any]] = []
    after: str | None = paging.after
    for _ in count():
        assert paging.count is not None
        seen = look(history, view, run, paging=paging.beginning_at(after or "", paging.count))
        assert len(seen["rows"]) <= paging.count
        found += reversed(seen["rows"]) if paging.last else seen["rows"]
        after = seen["next"]
        if after is None:
            return found
    raise AssertionError


@pytest.mark.parametrize(
    ("view", "size"),
    [
        (View.ROUNDS, 7),
        (View.ROUNDS, 65),
        (View.ROUNDS, 1_000),
        (View.VERSIONS, 7),
        (View.CLIENTS, 240),
        (View.CLIENTS, 1_000),
    ],
)
def test_the_pages_have_every_row_once(small: History, view: View, size: int) -> None:
    whole = look(small, view, RUN)["rows"]
    assert walked(small, view, Paging(size)) == whole
    if view is not View.CLIENTS:
        assert walked(small, view, Paging(size, last=True)) == whole[::-1]


def test_a_page_begins_after_its_cursor(small: History) -> None:
    seen = look(small, View.ROUNDS, RUN, paging=Paging(2, "5"))
    assert [row["round"] for row in seen["rows"]] == [6, 7]
    assert seen["next"] == "7"
    seen = look(small, View.ROUNDS, RUN, paging=Paging(2, "5", last=True))
    assert [row["round"] for row in seen["rows"]] == [3, 4]
    assert look(small, View.ROUNDS, RUN, paging=Paging(2, "130")) == {"run": RUN, "rows": [], "next": None}
    seen = look(small, View.CLIENTS, RUN, paging=Paging(2, "client-0000498"))
    assert [row["client"] for row in seen["rows"]] == ["client-0000499", "client-0000500"]
    assert look(small, View.CLIENTS, RUN, paging=Paging(2, "d")) == {"run": RUN, "rows": [], "next": None}


@pytest.mark.parametrize(
    ("view", "paging", "fits"),
    [
        (View.ROUNDS, Paging(9, state="abandoned"), lambda row: row["phase"] == "abandoned"),
        (View.ROUNDS, Paging(9, fate="lost"), lambda row: row["lost"] > 0),
        (View.ROUNDS, Paging(9, text="NO UPDATE"), lambda row: "no update" in row["detail"]),
        (View.ROUNDS, Paging(9, client="client-0000150"), lambda row: row["round"] == 50),
        (View.ROUNDS, Paging(9, client="client-0000150", fate="lost"), lambda row: row["round"] == 50),
        (View.ROUNDS, Paging(9, client="client-0000150", fate="reported"), lambda row: False),
        (View.ROUNDS, Paging(9, client="nobody"), lambda row: False),
        (View.CLIENTS, Paging(9, state="failed"), lambda row: row["last_failure"] is not None),
        (View.CLIENTS, Paging(9, state="connected"), lambda row: False),
        (View.CLIENTS, Paging(90, state="away"), lambda row: True),
        (View.CLIENTS, Paging(9, prefix="client-000099"), lambda row: row["client"].startswith("client-000099")),
        (View.CLIENTS, Paging(9, text="No Memory"), lambda row: row["last_failure"] is not None),
    ],
)
@pytest.mark.parametrize("looked_at", [40, 10_000])
def test_a_filter_leaves_the_rows_that_fit(
    small: History, monkeypatch: pytest.MonkeyPatch, view: View, paging: Paging, fits: Any, looked_at: int
) -> None:
    """Also where a page may look at forty rows only, so that some pages are empty and name the next one."""
    if looked_at == 40:
        if view is View.CLIENTS:
            paging = paging.beginning_at("client-0000900", paging.count or 0)
        monkeypatch.setattr(clients, "CLIENTS_LOOKED_AT_MAX", looked_at)
        monkeypatch.setattr(views, "LOOKED_AT_MAX", looked_at)
        monkeypatch.setattr(pages.page, "__defaults__", (looked_at,))
    whole = [row for row in look(small, view, RUN)["rows"] if fits(row)]
    if view is View.CLIENTS:
        whole = [row for row in whole if row["client"] > paging.after]
    assert walked(small, view, paging) == whole


def test_the_open_round_is_on_the_last_page_and_on_the_first_of_the_newest(tmp_path: Path) -> None:
    with StateDirectory.open(tmp_path / "state") as state:
        write_history(state, IN_ROUND_4)
        history = History(state.path)
    for size in (1, 3, 4, 9):
        assert [row["round"] for row in walked(history, View.ROUNDS, Paging(size), "r")] == [1, 2, 3, 4]
        assert [row["round"] for row in walked(history, View.ROUNDS, Paging(size, last=True), "r")] == [4, 3, 2, 1]
    (open_round,) = look(history, View.ROUNDS, "r", paging=Paging(1, last=True))["rows"]
    assert open_round["phase"] == "collecting"
    of_client = walked(history, View.ROUNDS, Paging(9, client="c", last=True), "r")
    assert of_client[0]["round"] == 4
    by_page = walked(history, View.CLIENTS, Paging(1), "r")
    assert by_page == look(history, View.CLIENTS, "r")["rows"]
    assert sum(row["invited"] for row in by_page) == sum(
        row["invited"] for row in look(history, View.ROUNDS, "r", paging=ALL)["rows"]
    )


def test_no_list_decodes_a_record_and_no_view_of_an_ended_run_reads_all_members(
    small: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("atoll.server.views.history.recover", refuse)
    for name, (view, number, paging) in VIEWS.items():
        with monkeypatch.context() as patched:
            if view in (View.ROUNDS, View.CLIENTS, View.VERSIONS, View.RUN):
                patched.setattr("atoll.server.views.history.decode_record", refuse)
            assert look(small, view, "" if view is View.RUNS else RUN, number, paging), name


def test_a_run_that_is_deleted_between_two_pages_is_named(tmp_path: Path) -> None:
    from atoll.server.journal.journal import Journal

    build(tmp_path / "state", 20, 20)
    history = History(tmp_path / "state")
    assert look(history, View.ROUNDS, RUN, paging=Paging(5))["next"] == "5"
    with StateDirectory.open(tmp_path / "state") as state:
        Journal(state).delete_run(RunId(RUN))
        with pytest.raises(LookupError, match="many-1"):
            look(history, View.ROUNDS, RUN, paging=Paging(5, "5"))
        with state.database.transaction() as connection:
            for table in ("summaries", "participations", "members"):
                assert connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar() == 0


@pytest.mark.slow
def test_a_hundred_thousand_members_cost_at_most_twice_the_time_of_a_thousand(tmp_path: Path) -> None:
    """In time of the processor; 20 ms of both are allowed for what the clock does not tell apart."""
    sizes = {"small": 1_000, "large": 100_000}
    for name, members in sizes.items():
        build(tmp_path / name, members, 200)
    for view, (kind, number, paging) in VIEWS.items():
        seconds = dict.fromkeys(sizes, math.inf)
        for _ in range(20):  # a busy machine lengthens also the time of the processor, but not each time
            for name in sizes:
                seconds[name] = min(seconds[name], _seconds(tmp_path / name, kind, number, paging))
            if seconds["large"] <= 2 * seconds["small"] + 0.02:
                break
        assert seconds["large"] <= 2 * seconds["small"] + 0.02, (view, seconds)


def _seconds(folder: Path, view: View, number: int, paging: Paging) -> float:
    begin = time.process_time()
    look(History(folder), view, "" if view is View.RUNS else RUN, number, paging)
    return time.process_time() - begin
