"""The bounds of pages: what is left out is said, with the way to it."""

from typing import Any

from atoll.dashboard.charts import CURVES_MAX
from atoll.dashboard.pages import (
    agents,
    alerts,
    audit,
    compare,
    privacy,
    rounds,
    run,
    runs,
    sites,
    statistics,
    versions,
)
from atoll.dashboard.pages.blocks import JSON_HAS_ALL, Curves, Facts, Form, Grid, Sentences, TableBlock, Timeline
from atoll.dashboard.pages.runs import OfPlace
from tests.dashboard.conftest import HOSTILE

NAMES = [f"site-{number:05d}" for number in range(3_000)]


def client(**other: Any) -> dict[str, Any]:
    return {
        **dict.fromkeys(("reason", "detail", "unused_because"), ""),
        **dict.fromkeys(("download_seconds", "train_seconds", "upload_begun_at"), None),
        **{"fate": "reported", "invited_at": 1.0, "fate_at": 5.0, "num_examples": 3, "num_bytes": 4},
        **other,
    }


def record(clients: dict[str, Any]) -> dict[str, Any]:
    told = [f"{name} ({one['fate']}): its update was accepted." for name, one in clients.items()]
    return {
        **dict.fromkeys(("linger_by", "grace_by")),
        **{"round_id": 7, "phase": "committed", "opened_at": 0.0, "ended_at": 9.0, "deadline": 8.0},
        **{"clients": clients, "sentences": ["Round 7 was committed.", *told], "training": {}},
    }


def blocks_of(page: Any, kind: type) -> list[Any]:
    return [block for block in page.blocks if isinstance(block, kind)]


def test_a_round_of_thousands_shows_the_troubled_first() -> None:
    clients = {name: client() for name in NAMES} | {"zoe": client(fate="lost", reason="silent")}
    page = rounds.round_(1, "state", "r", record(clients), 10.0)
    (told,), (bars,), (fates,) = (blocks_of(page, kind) for kind in (Sentences, Timeline, TableBlock))
    assert [*told.lines] == ["Round 7 was committed.", "zoe (lost): its update was accepted."]
    assert told.note.startswith("3000 sentences left out")
    assert [row[0].text for row in fates.rows][:2] == ["zoe", NAMES[0]]
    assert len(fates.rows) == 1_000
    assert fates.note == "2001 sites left out: /runs/1/r/rounds/7.json has all"
    assert len(bars.bars.bars) == 50
    assert bars.note == "2951 sites left out: the table has them"


def test_a_small_round_is_told_whole() -> None:
    page = rounds.round_(1, "state", "r", record({"a": client(), HOSTILE: client()}), 10.0)
    (told,) = blocks_of(page, Sentences)
    assert len(told.lines) == 3
    assert told.note == ""


def test_a_traceback_of_a_site_is_its_exception() -> None:
    """The table and the sentences have the end, not the first frames; the document has all."""
    frames = "\n".join(f'  File "/opt/site/task_{number}.py", line {number}, in train' for number in range(60))
    detail = f"Traceback (most recent call last):\n{frames}\nOSError: the disk is away"
    failed = record({"hill": client(fate="failed", reason="training_failed", detail=detail)})
    below = "".join(f"\n    {line}" for line in detail.splitlines())
    failed["sentences"][1] = f"hill (failed): its training raised an error (training_failed):{below}"
    page = rounds.round_(1, "state", "r", failed, 10.0)
    (told,), (fates,) = blocks_of(page, Sentences), blocks_of(page, TableBlock)
    assert told.lines[1] == "hill (failed): its training raised an error (training_failed): OSError: the disk is away"
    assert "OSError: the disk is away" in [cell.text for cell in fates.rows[0]]
    several = record({"hill": client(fate="refused", detail="one fault\nanother")})
    (fates,) = blocks_of(rounds.round_(1, "state", "r", several, 10.0), TableBlock)
    assert "one fault another" in [cell.text for cell in fates.rows[0]]


def test_the_parts_of_a_bar_are_the_times_of_its_client() -> None:
    one = client(invited_at=1.0, download_seconds=1.0, train_seconds=2.0, upload_begun_at=4.5, fate_at=6.0)
    (bars,) = blocks_of(rounds.round_(1, "state", "r", record({"a": one}), 10.0), Timeline)
    parts = [(part.kind, part.text) for part in bars.bars.bars[0].parts]
    assert parts == [
        ("wait", "wait 1.00 s"),
        ("download", "download 1.00 s"),
        ("train", "train 2.00 s"),
        ("wait", "wait 0.50 s"),
        ("upload", "upload 1.50 s"),
    ]


def test_clocks_that_jump_and_open_rounds_have_bars() -> None:
    odd = {
        "back": client(invited_at=5.0, fate_at=2.0, download_seconds=9.0),
        "open": client(fate="joined", fate_at=None, train_seconds=1e9),
        "early": client(upload_begun_at=0.5),
    }
    page = rounds.round_(1, "state", "r", record(odd) | {"ended_at": None, "phase": "collecting"}, 10.0)
    (bars,) = blocks_of(page, Timeline)
    assert all(part.width > 0 for bar in bars.bars.bars for part in bar.parts)


def test_the_grid_has_the_troubled_first_and_says_what_it_leaves_out() -> None:
    clients = {name: {"1": "reported", "2": "reported"} for name in NAMES} | {"zoe": {"2": "lost"}}
    found = run.grid(1, "r", {"rounds": [1, 2], "clients": clients})
    assert isinstance(found, Grid)
    assert [name.text for name, _ in found.rows][:2] == ["zoe", NAMES[0]]
    assert [fate.mark for fate in found.rows[0][1]] == ["", "lost"]
    assert len(found.rows) == 100
    assert found.note.startswith("2901 sites with fewer troubles left out")


def test_two_hundred_metrics_are_fifty_curves() -> None:
    metrics = {str(v): {"server": {f"m{n:03d}": 1.0 * v for n in range(200)}} for v in (1, 2)}
    found = run.curves_of(metrics)
    assert isinstance(found, Curves)
    assert sum(len(chart.lines) for chart in found.charts) == CURVES_MAX
    assert found.note.startswith("150 metrics left out")
    assert run.curves_of({"1": {"server": {"m": None, "text": "x", "sums": [1, 2]}}}) is None


def test_names_that_look_alike_share_no_curve() -> None:
    """Of metrics and sources of a run, of a site's metrics, and of compared runs; each keeps its own values."""
    alike = ["loss", "loss\n", "\u202eloss", "\\u202eloss"]
    labels = ["loss", "loss (2)", "\\u202eloss (2)", "\\u202eloss"]
    values = {name: float(place) for place, name in enumerate(alike)}

    def seen(block: Any) -> dict[tuple[str, str], str]:
        return {(one.title, line.name): line.newest for one in block.charts for line in one.lines}

    found = run.curves_of({"1": {"server": values, "server ": dict.fromkeys(alike, 9.0)}})
    newest = zip(labels, map(str, range(4)), strict=True)
    of_server = {(label, "server"): value for label, value in newest}
    assert found is not None
    assert seen(found) == of_server | {(label, "server (2)"): "9" for label in labels}
    nothing = {"curves": {}, "not_shown": {}}
    of_site = nothing | {"curves": {"a": {name: [(1, value)] for name, value in values.items()}}}
    metrics = {"evaluation": of_site, "training": nothing}
    (curves,) = blocks_of(sites.site(1, "s", "r", "a", None, [], {"rounds": [], "clients": {}}, metrics), Curves)
    assert seen(curves) == {(f"{label} (evaluation)", "a"): value for (label, _), value in of_server.items()}
    document = {"metric": "m", "metrics": ["m"], "over": "round", "settings": [], "runs": [], "left_out": {}}
    document["curves"] = {name: [(1, value), (2, value)] for name, value in values.items()}
    (curves,) = blocks_of(compare.compare(document, {}, []), Curves)
    assert seen(curves) == {("m", label): value for (label, _), value in of_server.items()}


def test_the_list_of_runs_and_of_members_has_a_thousand_rows() -> None:
    row = {**dict.fromkeys(("name", "task", "cause", "exchanges", "created_at")), "state": "finished", "version": 1}
    many = [row | {"run": f"r-{number}", "rounds": 3} for number in range(1_500)]
    table, form = runs.runs([OfPlace(1, "state", "deployed", many)]).blocks
    assert isinstance(table, TableBlock)
    assert isinstance(form, Form)
    assert [*table.chosen[:2]] == ["1/r-1499", "1/r-1498"]
    assert [line[0].text for line in table.rows[:2]] == ["r-1499", "r-1498"]
    assert len(table.rows) == 1_000
    assert table.note.startswith("500 older runs left out")
    members = [{"name": n, "role": "client", "standing": "member", "since": 1.0, "expires_at": None} for n in NAMES]
    (table,) = runs.members(1, "state", members).blocks
    assert isinstance(table, TableBlock)
    assert (len(table.rows), table.note) == (1_000, "2000 members left out: narrow by role, standing or name")
    (table,) = runs.members(1, "state", members, text="00042").blocks
    assert isinstance(table, TableBlock)
    assert [line[0].text for line in table.rows] == ["site-00042"]


def test_a_place_that_cannot_be_read_says_why_and_hides_no_other() -> None:
    page = runs.runs([OfPlace(1, "away", "deployed", fault="no answer\u202e"), OfPlace(2, "here", "simulated")])
    assert [block.title for block in page.blocks] == ["away", "here"]
    (told,) = blocks_of(page, Sentences)
    assert [*told.lines] == ["no answer\\u202e"]


def test_a_version_has_at_most_twenty_metrics() -> None:
    row = {
        **{"version": 1, "created_at": 1.0, "kept": True, "best": False, "num_bytes": 1, "digest": "0" * 64},
        **{"metrics": {"clients": {"z": 1.0}, "server": {f"m{n:02d}": 0.5 for n in range(30)}}},
    }
    document = {"run": "r", "settings": {"model": {"start": "run:other@3"}}, "version": 1}
    facts, table = versions.versions(1, "state", document, [row], None, {}).blocks
    assert isinstance(table, TableBlock)
    assert "server/m19" in table.columns
    assert "server/m20" not in table.columns
    assert table.note.startswith("11 metrics left out")
    assert "run:other@3" in str(facts)


def test_a_site_that_no_run_knows_has_a_page() -> None:
    nothing: dict[str, Any] = {"curves": {}, "not_shown": {}}
    metrics = {"evaluation": nothing, "training": nothing | {"not_shown": {HOSTILE: "its policy merges metrics"}}}
    page = sites.site(1, "state", "r", HOSTILE, None, [], {"rounds": [], "clients": {}}, metrics)
    told = [line for block in blocks_of(page, Sentences) for line in block.lines]
    assert told == ["no client of this run has this name", "training: its policy merges metrics"]
    assert "\u202e" not in page.title


def test_the_policy_counts_what_ended_the_rounds() -> None:
    ends = [("committed", "enough")] * 3 + [("abandoned", "quorum")]
    rows = [{"phase": phase, "reason": reason, "reported": 2, "lost": 1, "invited": 3} for phase, reason in ends]
    document = {"run": "r", "settings": {"round": {"quorum": 2, "late": None}, "pause": 1.5}}
    page = rounds.policy(1, "state", document, rows)
    of_ends, of_fates = blocks_of(page, TableBlock)
    cells = [[cell.text for cell in row] for row in of_ends.rows]
    assert cells == [["committed", "enough", "3", "75%"], ["abandoned", "quorum", "1", "25%"]]
    cells = [[cell.text for cell in row] for row in of_fates.rows]
    assert cells == [["reported", "8", "66.7%"], ["lost", "4", "33.3%"]]
    (rules,) = blocks_of(page, Facts)
    assert [(name, cell.text) for name, cell in rules.rows] == [("round.quorum", "2"), ("pause", "1.5 s")]


def test_statistics_of_many_sites_and_labels_have_ten_thousand_cells() -> None:
    counts = {str(label): 1 for label in range(400)}
    part = {"labels": {"target": {"counts": counts, "sites": 1}, "other": {"counts": counts, "sites": 1}}}
    found: dict[str, Any] = {
        **{"number": 3, "task": HOSTILE, "asked": NAMES[:400], "answered": NAMES[:400], "ended_at": 1.0},
        **{"refused": dict.fromkeys(NAMES, "why"), "merged": {"train": part}, "not_merged": {}, "left_out": {}},
        **{"sites": {name: {"train": part} for name in NAMES[:400]}, "not_shown": {}},
    }
    page = statistics.statistics(1, "state", found)
    tables, told = blocks_of(page, TableBlock), blocks_of(page, Sentences)
    assert [len(table.columns) for table in tables] == [300, 300]
    assert sum(len(row) for table in tables for row in table.rows) <= 10_000
    assert tables[0].note.startswith("102 columns left out")
    assert "367 rows left out" in tables[0].note
    assert [*tables[1].rows] == []
    assert (len(told[0].lines), told[0].note) == (200, f"2800 sentences left out: {JSON_HAS_ALL}")
    assert "\u202e" not in page.lead
    assert page.tabs[-2:] == [("Statistics 2", "/statistics/1?number=2"), ("Newest", "/statistics/1")]


def test_privacy_has_the_budget_the_curve_and_the_sessions_by_stage() -> None:
    sent = {"keys": 3, "shares": 3, "masked": 2, "signed": 0, "revealed": 0}
    one = {"round": 7, "session": 0, "attempt": 1, "stage": "masking", "members": 3, "threshold": 2, "sent": sent}
    one |= {"left": 1, "left_out": [HOSTILE], "wrong": [], "is_dropped": False, "detail": ""}
    guarantee = {"sentence": "One client is protected.", "epsilon": 2.5, "epsilon_max": 8.0, "delta": 1e-5}
    guarantee |= {"participations_max": 4, "clients": 9, "clients_with_budget": 0}
    spent = [{"round": number, "epsilon": 0.5 * number} for number in range(1, 6)] + [{"round": 6, "epsilon": None}]
    page = privacy.privacy(1, "state", "r", guarantee, [one | {"round": n} for n in range(600)], spent)
    (budget,), (curves,), (table,) = (blocks_of(page, kind) for kind in (Facts, Curves, TableBlock))
    assert dict(budget.rows)["clients with budget left"].mark == "lapsed"
    assert curves.charts[0].lines[0].newest == "2.5"
    assert [cell.text for cell in table.rows[0]][:11] == ["599", "0", "1", "masking", "3", "2", "3", "3", "2", "0", "0"]
    assert "\u202e" not in table.rows[0][-1].text
    assert (len(table.rows), table.note) == (500, "100 sessions left out: the pages of the rounds have them")
    nothing = privacy.privacy(1, "state", "r", None, [], [])
    assert blocks_of(nothing, Sentences)[0].lines == [privacy.NONE]


def test_a_log_that_is_faulty_shows_its_faults_and_one_that_is_verified_says_so() -> None:
    event = dict.fromkeys(("time", "actor", "role", "action", "object", "outcome"), HOSTILE) | {"digests": {}}
    document = {"events": [event | {"seq": n} for n in range(40, 60)], "checkpoint": None}
    found = {"num_faults": 130, "faults": [f"line {n}" for n in range(100)], "first": 0, "last": 59, "unsigned": 2}
    found |= {"key": "ab", "checkpoint_time": None, "relies_on": None}
    page = audit.audit(1, "state", "audit", document, audit.Proof(1.0, found, "FAULTY: 130 faults"), {}, count=20)
    (proof,), (faults,), (table,) = (blocks_of(page, kind) for kind in (Facts, Sentences, TableBlock))
    assert dict(proof.rows)["chain"].mark == "failed"
    assert (len(faults.lines), faults.note) == (100, "30 faults more")
    assert [row[0].text for row in table.rows][:2] == ["59", "58"]
    assert table.links == [("Older", "/audit/1?before=40")]
    later = audit.audit(1, "state", "audit", document, audit.Proof(), {"before": "60", "actor": "a&b"}, count=30)
    assert later.every > 0
    assert blocks_of(later, TableBlock)[0].links == [("Newest", "/audit/1?actor=a%26b")]
    away = audit.audit(1, "state", "audit", document, audit.Proof(sentence="no answer"), {}, count=30)
    assert away.every == 0
    assert dict(blocks_of(away, Facts)[0].rows)["chain"].text == "no answer"


def test_an_alert_leads_to_the_page_to_look_at() -> None:
    def row(condition: str, subject: str = "r", run: str = "") -> dict[str, Any]:
        return {
            "level": "warning",
            "condition": condition,
            "subject": subject,
            "run": run,
            "sentence": "s",
            "docs": "d",
        }

    rows = [
        row("AtollRunFailed", run="r"),
        row("AtollRoundsAbandoned", run="r"),
        row("approval", f"r at {HOSTILE}", "r"),
        row("away", "north"),
        row("audit"),
        row("disk", "/state"),
    ]
    (table,) = alerts.alerts(1, "state", rows).blocks
    assert isinstance(table, TableBlock)
    hrefs = [line[3].href for line in table.rows]
    assert hrefs[:2] == ["/runs/1/r", "/runs/1/r/rounds"]
    assert hrefs[2].startswith("/runs/1/r/site?name=%3Cscript%3E")
    assert hrefs[3:] == ["/members/1", "/audit/1", ""]
    (table,) = alerts.alerts(1, "north", [row("approval", "r-1"), row("away")], is_agent=True).blocks
    assert isinstance(table, TableBlock)
    assert [line[3].href for line in table.rows] == ["/agents/1", ""]
    (table,) = alerts.alerts(1, "state", rows * 300).blocks
    assert isinstance(table, TableBlock)
    assert (len(table.rows), table.note) == (1_000, f"800 conditions left out: {JSON_HAS_ALL}")


def test_a_site_with_thousands_of_requests_shows_five_hundred() -> None:
    row = dict.fromkeys(("task", "algorithm", "codec", "metrics", "secure", "local", "terms"), HOSTILE)
    rows = [row | {"run": name, "standing": "undecided", "asked_at": 1.0, "decided_at": None} for name in NAMES]
    waiting = {"round": 1, "num_bytes": 3, "num_examples": 1, "is_masked": True, "train_seconds": 1.0, "at": None}
    page = agents.requests(1, "north", rows, [waiting | {"run": name} for name in NAMES], {})
    (told,), (table, spool) = blocks_of(page, Sentences), blocks_of(page, TableBlock)
    assert f"{NAMES[9]} and 2990 more" in told.lines[0]
    assert (len(table.rows), table.note) == (500, f"2500 runs left out: {JSON_HAS_ALL}")
    assert (len(spool.rows), spool.note[:21]) == (200, "2800 updates left out")
    page = agents.requests(1, "north", rows, [], {"standing": "approved"})
    assert blocks_of(page, TableBlock)[0].empty == "no such run"
    one = {"data": HOSTILE, "unit": "client", "charges": 1, "spent": float("nan"), "epsilon_max": 1.0, "delta": 1e-6}
    one |= {"uses_left": None, "last_at": None, "refused": HOSTILE, "runs": [], "tasks": [], "accountant": ""}
    page = agents.budgets(1, "north", {"ledger": "/x", "budgets": [one] * 700})
    assert blocks_of(page, TableBlock)[0].note == f"200 rows left out: {JSON_HAS_ALL}"
    assert blocks_of(page, Sentences)[0].note == f"200 data sets left out: {JSON_HAS_ALL}"


def test_a_sweep_of_thousands_has_its_axes_as_columns_and_fifty_curves() -> None:
    row = {"state": "finished", "version": 3, "rounds": 3, "bytes": 5, "seconds": 1.0, "final": 0.5, "best": 0.5}
    names = NAMES[:200]
    axes = [{"setting": f"x{n:02d}", "values": [HOSTILE] * 200} for n in range(30)]
    found: dict[str, Any] = {
        **{"metric": "server/accuracy", "metrics": ["server/accuracy"], "over": "bytes", "settings": axes},
        **{"runs": [row | {"name": name} for name in names], "left_out": {}},
        **{"curves": {name: [(1e6, 0.5), (2e6, 0.6)] for name in names}},
    }
    page = compare.compare(found, {names[0]: "/runs/1/a"}, [("sweep", "1/s")], sweep=HOSTILE, num_left=2_800)
    (table,), (curves,) = blocks_of(page, TableBlock), blocks_of(page, Curves)
    assert table.columns[:2] == ("run", "x00")
    assert "x19" in table.columns
    assert "x20" not in table.columns
    assert table.note.startswith("2800 cells left out")
    assert "10 differing settings left out" in table.note
    assert sum(len(one.lines) for one in curves.charts) == CURVES_MAX
    assert curves.note.startswith("150 curves left out")
    assert curves.charts[0].over == "megabytes"
    (curves,) = blocks_of(compare.compare(found | {"over": "seconds"}, {}, []), Curves)
    assert curves.charts[0].over == "seconds", "virtual ones of a simulation, real ones of a deployed run"
    assert "\u202e" not in page.title
    page = compare.compare(found | {"metric": None, "curves": {}}, {}, [("run", "1/a")])
    settings, table = blocks_of(page, TableBlock)
    assert (len(settings.rows), settings.title) == (30, "Differing settings")
    assert table.fields[0].choices == ["server/accuracy"]
    assert blocks_of(page, Curves) == []
