"""The pages of a site's agent: what was asked of the site, its decisions by rule, its spool, and its budgets."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atoll.dashboard.pages import addresses
from atoll.dashboard.pages.blocks import (
    Block,
    Cell,
    Facts,
    Field,
    Form,
    Page,
    Sentences,
    TableBlock,
    cell,
    duration,
    instant,
    left_out,
    shown,
    size,
    state_cell,
    text,
)
from atoll.ground.printable import count_of, some_of

Document = Mapping[str, Any]

ROWS_MAX, SPOOL_MAX = 500, 200
"""Largest numbers of rows of a table, and of updates of the spool."""

RULES_MAX = 100
"""Largest number of rows of the rules that have decided."""

EVERY_S = 5
"""Seconds after which a page is read again."""

STANDINGS = ("undecided", "approved", "rejected")

DECIDED_MAX = 10
"""Largest number of requests without a decision that have buttons on the page of the site."""


def trail(place: int, label: str) -> list[tuple[str, str]]:
    """Return the pages above a page that decides on a request."""
    return [*addresses.trail(place, label), ("Site", addresses.of_agent(place))]


def requests(
    place: int,
    label: str,
    rows: Sequence[Document],
    spool: Sequence[Document],
    asked: Mapping[str, str],
    token: str = "",
) -> Page:
    """Return the page of what was asked of a site.

    Args:
        place: the number of the place.
        label: its name.
        rows: the runs that have asked, as `atoll site list --json`.
        spool: the finished updates that wait, as `Agent.spool` has them.
        asked: the filters `standing` and `text`.
        token: the token of the visitor's forms; empty: there are none.
    """
    standing, part = asked.get("standing", ""), asked.get("text", "")
    wanted = [
        row
        for row in rows
        if standing in ("", row["standing"]) and part.lower() in f"{row['run']} {row['task']}".lower()
    ]
    undecided = [row["run"] for row in rows if row["standing"] == "undecided"]
    blocks: list[Block] = []
    if undecided:
        blocks.append(Sentences("Waiting", [*_waiting(undecided, has_forms=bool(token))]))
    due = [row for row in wanted if row["standing"] == "undecided"] if token else []
    blocks += [decision(place, row, token) for row in due[:DECIDED_MAX]]
    blocks.append(
        TableBlock(
            "Runs that have asked",
            (
                *("run", "standing", "task", "asked", "decided", "algorithm", "codec", "metrics"),
                *("secure", "training settings", "terms"),
            ),
            [_request(place, row, has_forms=bool(token)) for row in wanted[:ROWS_MAX]],
            left_out(len(wanted), ROWS_MAX, "run"),
            "no such run" if rows else "no run has asked this site yet",
            (),
            [Field("standing", "standing", standing, STANDINGS), Field("text", "text", part)],
        )
    )
    blocks.append(
        TableBlock(
            "Spool",
            ("run", "round", "size", "examples", "in a secure sum", "training", "since"),
            [_spooled(row) for row in spool[:SPOOL_MAX]],
            left_out(len(spool), SPOOL_MAX, "update", "they are in the folder `spool` of the state directory"),
            "no finished update waits for the coordinator",
        )
    )
    lead = count_of(len(rows), "run has asked", "runs have asked")
    return Page("Site", blocks, addresses.trail(place, label), addresses.tabs_of_agent(place), lead=lead, every=EVERY_S)


def request(place: int, label: str, row: Document, token: str) -> Page:
    """Return the page of one request, with all of its terms and the forms that decide on it.

    Args:
        place: the number of the place.
        label: its name.
        row: the request, as `atoll site list --json` has it.
        token: the token of the visitor's forms.
    """
    rows = [(name, _terms_cell(row, name)) for name in ("task", "algorithm", "codec", "metrics", "secure", "terms")]
    times = [("asked", instant(row["asked_at"])), ("decided", instant(row["decided_at"]))]
    blocks: list[Block] = [
        Facts("Request", [("run", cell(row["run"])), ("standing", state_cell(row["standing"])), *times, *rows]),
        text("Training settings", str(row["local"])),
        decision(place, row, token),
    ]
    return Page(f"Request of {shown(row['run'])}", blocks, trail(place, label))


def decision(place: int, row: Document, token: str) -> Form:
    """Return the form that approves or rejects a run that has asked; arguments as of `request`."""

    def address(act: str) -> str:
        return addresses.of_agent(place, f"control/{act}", run=row["run"])

    acts = [(title, address(act)) for act, title, standing in ACTS if standing != row["standing"]]
    (first, to), *others = acts
    note = f"task {shown(row['task'])}, terms {row['terms']}"
    seen = [("terms", str(row["terms"])), ("standing", str(row["standing"]))]
    return Form(f"Decide on {shown(row['run'])}", to, first, (), token, note, hidden=seen, others=others)


ACTS = (("approve", "Approve", "approved"), ("reject", "Reject", "rejected"))
"""The decisions: the end of their address, their button, and the standing that they give."""


def _waiting(undecided: Sequence[str], *, has_forms: bool) -> Iterator[str]:
    names = some_of(map(shown, undecided), 10)
    how = "`atoll site approve RUN` or `atoll site reject RUN`, after a look at the terms"
    if has_forms:
        how = f"the forms of the first {DECIDED_MAX} below, and of each run with all of its terms behind its standing"
    yield f"without a decision: {names}; if the policy wants one (`approval`): {how}"


def _request(place: int, row: Document, *, has_forms: bool) -> list[Cell]:
    return [
        cell(row["run"], addresses.of_place(place, "decisions", actor=row["run"])),
        state_cell(row["standing"], addresses.of_agent(place, "control", run=row["run"]) if has_forms else ""),
        cell(row["task"]),
        *(instant(row["asked_at"]), instant(row["decided_at"])),
        *(_terms_cell(row, name) for name in ("algorithm", "codec", "metrics", "secure", "local", "terms")),
    ]


def _terms_cell(row: Document, name: str) -> Cell:
    if name == "codec":
        return cell((row["codec"] or "plain") if row["algorithm"] else None)
    return cell("sums" if row["secure"] else None) if name == "secure" else cell(row[name])


def _spooled(row: Document) -> list[Cell]:
    return [
        *(cell(row["run"]), cell(row["round"]), size(row["num_bytes"]), cell(row["num_examples"])),
        *(cell(row["is_masked"]), duration(row["train_seconds"]), instant(row["at"])),
    ]


def by_rule(events: Sequence[Document]) -> TableBlock:
    """Return how often which rule of the policy has decided what, among some events of the log of decisions."""
    decided: Counter[tuple[str, str, str]] = Counter()
    for event in events:
        kind, mark, outcome = str(event["action"]).partition(".")
        if mark and event["role"] == "run" and kind in KINDS:
            decided[kind, outcome, str(event["outcome"]).partition(":")[0]] += 1
    rows = [
        (cell(kind), state_cell(outcome), cell(rule), cell(number))
        for (kind, outcome, rule), number in decided.most_common(RULES_MAX)
    ]
    return TableBlock(
        "By rule of the policy",
        ("request", "outcome", "rule", "decisions"),
        rows,
        f"of the newest {count_of(len(events), 'line')}" + (f"; {more}" if (more := _more_rules(decided)) else ""),
        "no decision in the newest lines",
    )


KINDS = ("train", "evaluate", "statistics", "upload")
"""The kinds of requests on which a policy decides, as actions begin with them."""


def _more_rules(decided: Counter[tuple[str, str, str]]) -> str:
    return left_out(len(decided), RULES_MAX, "rule")


def budgets(place: int, label: str, found: Document) -> Page:
    """Return the page of the privacy budgets of a site's data; `found` is as `atoll site budgets --json`."""
    each = list(found["budgets"])
    refused = [f"{shown(one['data'])}: {shown(one['refused'])}" for one in each if one["refused"]]
    blocks: list[Block] = [Facts("Ledger", [("file", cell(found["ledger"]))])]
    if refused:
        blocks.append(Sentences("Refused", refused[:ROWS_MAX], note=left_out(len(refused), ROWS_MAX, "data set")))
    columns = ("data", "unit", "run", "charges", "epsilon", "of", "delta", "uses left", "last charge")
    rows = [row for one in each for row in _budget(one)]
    blocks.append(
        TableBlock(
            "Budgets of the data sets",
            columns,
            rows[:ROWS_MAX],
            left_out(len(rows), ROWS_MAX, "row"),
            "nothing was charged here; with [[privacy.data]] in its policy a site's data have budgets",
        )
    )
    return Page("Budgets", blocks, addresses.trail(place, label), addresses.tabs_of_agent(place), every=EVERY_S)


def _budget(one: Document) -> Iterator[list[Cell]]:
    mark = "refused" if one["refused"] else ""
    numbers = [cell(one["charges"]), cell(one["spent"]), cell(one["epsilon_max"]), cell(one["delta"])]
    yield [cell(one["data"], mark=mark), cell(one["unit"]), Cell("all"), *numbers, *_last(one, one["uses_left"])]
    for run in one["runs"]:
        name = f"{run['run']} ({run['coordinator']})" if run["coordinator"] else run["run"]
        of_run = [cell(run["charges"]), cell(run["epsilon"]), Cell("-"), Cell("-")]
        yield [cell(one["data"]), cell(one["unit"]), cell(name), *of_run, *_last(run, None)]


def _last(row: Document, uses_left: Any) -> list[Cell]:
    return [cell(uses_left), instant(row["last_at"])]


def peers(place: int, label: str, rows: Sequence[Document]) -> Page:
    """Return the page of the sites with which a site joins secure sums; `rows` are as `atoll site peers --json`."""
    table = TableBlock(
        "Other sites",
        ("site", "standing", "fingerprint", "sessions"),
        [
            (
                cell(row["site"]),
                cell(row["standing"], mark="approved" if row["standing"] == "pinned" else "refused"),
                cell(row["fingerprint"]),
                cell("two histories" if row["forked"] else row["sessions"], mark="failed" if row["forked"] else ""),
            )
            for row in rows[:ROWS_MAX]
        ],
        left_out(len(rows), ROWS_MAX, "site"),
        "no site is pinned or distrusted here yet: `atoll site trust NAME FINGERPRINT`",
    )
    return Page("Other sites", [table], addresses.trail(place, label), addresses.tabs_of_agent(place))
