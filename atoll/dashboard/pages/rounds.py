"""The pages of rounds: the list, one round with a bar for each client, and what the policy has decided."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from textwrap import dedent
from typing import Any

from atoll.dashboard import charts
from atoll.dashboard.pages import addresses
from atoll.dashboard.pages.blocks import (
    Block,
    Cell,
    Facts,
    Field,
    Page,
    Sentences,
    TableBlock,
    Timeline,
    cell,
    duration,
    instant,
    left_out,
    page_of_run,
    shown,
    size,
    state_cell,
    troubled_first,
)
from atoll.ground.printable import conclusion, count_of, lines_of

Document = Mapping[str, Any]

SENTENCES_MAX, BARS_MAX, ROWS_MAX = 200, 50, 1_000
"""Largest numbers of sentences, of bars, and of rows of a table."""

TOLD_MAX = 10
"""Largest number of clients of a round with a sentence for each that reported."""

FATES = ("reported", "failed", "refused", "lost", "straggler", "released", "late", "carried", "waiting", "joined")
PHASES = ("open", "committed", "abandoned")

COLUMNS = (
    *("round", "phase", "reason", "version", "invited", "reported", "failed", "refused", "lost", "straggler"),
    *("carried in", "examples", "received", "took"),
)
OF_EXCHANGES = (
    *("exchange", "kind", "phase", "reason", "nodes", "messages", "replies", "missing", "down", "up", "took"),
)


def rounds(
    place: int, label: str, run_id: str, rows: Sequence[Document], following: str | None, asked: Mapping[str, str]
) -> Page:
    """Return the page of a run's rounds, the newest first.

    Args:
        place: the number of the place.
        label: its name.
        run_id: the run.
        rows: a page of its rounds, as `atoll round list --json`.
        following: the cursor of the older rounds; None: there are none.
        asked: the filters and the cursor of this page.
    """
    is_of_messages = bool(rows) and "kinds" in rows[0]
    make = _exchange if is_of_messages else _round
    fields = [
        Field("state", "phase", asked.get("state", ""), PHASES),
        Field("client", "site", asked.get("client", "")),
        Field("fate", "fate", asked.get("fate", ""), FATES),
        Field("text", "text", asked.get("text", "")),
    ]
    table = TableBlock(
        "Exchanges" if is_of_messages else "Rounds",
        OF_EXCHANGES if is_of_messages else COLUMNS,
        [make(place, run_id, row) for row in reversed(rows)],
        f"{count_of(len(rows), 'row')}; older ones follow" if following is not None else "",
        "no such round",
        addresses.other_pages(place, run_id, "rounds", asked, following, ("Newest", "Older")),
        fields,
    )
    return page_of_run(f"Rounds of {run_id}", [table], place, label, run_id)


def round_(place: int, label: str, run_id: str, record: Document, now: float) -> Page:
    """Return the page of a round, or of an exchange.

    Args:
        place: the number of the place.
        label: its name.
        run_id: the run.
        record: as `atoll round show --json`.
        now: the time, to which the bars of an open round reach [s since the epoch].
    """
    number = int(record["round_id"])
    blocks: list[Block] = []
    lines = list(record["sentences"])
    told = [line for line in lines if not _is_of_table(line, record.get("clients") or {})][:SENTENCES_MAX]
    num_left_out = len(lines) - len(told)
    json = addresses.of_run(place, run_id, f"rounds/{number}.json")
    why = "left out, most of sites that reported"
    note = f"{count_of(num_left_out, 'sentence')} {why}: {json} has all" if num_left_out else ""
    blocks.append(Sentences("In sentences", [_in_one_line(line) for line in told], note=note))
    if clients := record.get("clients"):
        ordered = {name: clients[name] for name in troubled_first({name: clients[name]["fate"] for name in clients})}
        blocks += [_timeline(record, ordered, now), _fates(place, run_id, ordered, json)]
    elif messages := record.get("messages"):
        blocks.append(_messages(place, run_id, messages))
    blocks += _trainings(place, run_id, record.get("training") or {})
    around = [(f"Round {number - 1}", addresses.of_run(place, run_id, f"rounds/{number - 1}"))] if number > 1 else []
    if record["phase"] in ("committed", "abandoned"):
        around.append((f"Round {number + 1}", addresses.of_run(place, run_id, f"rounds/{number + 1}")))
    trail = [*addresses.trail(place, label, run_id), ("Rounds", addresses.of_run(place, run_id, "rounds"))]
    what = "Exchange" if "messages" in record else "Round"
    lead = shown(record["phase"])
    return Page(f"{what} {number} of {run_id}", blocks, trail, around, addresses.key_of(place, run_id), lead)


def policy(place: int, label: str, document: Document, rows: Sequence[Document]) -> Page:
    """Return the page of what the policy has decided: what closed the rounds, and which rules apply.

    Args:
        place: the number of the place.
        label: its name.
        document: the run, as `atoll run show --json`.
        rows: its newest rounds, as `atoll round list --json`.
    """
    run_id = str(document["run"])
    ends = Counter((str(row["phase"]), str(row["reason"] or "")) for row in rows)
    of_ends = [
        (
            state_cell(phase, addresses.of_run(place, run_id, "rounds", state=phase)),
            *(cell(reason), cell(num), Cell(f"{num / len(rows):.0%}")),
        )
        for (phase, reason), num in ends.most_common()
    ]
    fates = {fate: sum(int(row.get(fate) or 0) for row in rows) for fate in FATES}
    invited = sum(int(row.get("invited") or 0) for row in rows)
    of_fates = [
        (
            state_cell(fate, addresses.of_run(place, run_id, "rounds", fate=fate)),
            *(cell(num), Cell(f"{num / invited:.1%}")),
        )
        for fate, num in fates.items()
        if num
    ]
    over = f"over the newest {count_of(len(rows), 'round')}"
    settings = document["settings"]
    rules = [
        (f"{table}.{name}", cell(value))
        for table in ("round", "cohort", "wait")
        for name, value in (settings.get(table) or {}).items()
        if value is not None and not isinstance(value, Mapping)
    ]
    if settings.get("pause"):
        rules.append(("pause", duration(settings["pause"])))
    blocks: list[Block] = [
        TableBlock("What ended the rounds", ("phase", "reason", "rounds", "share"), of_ends, over, "no round yet"),
        TableBlock("What became of the invited sites", ("fate", "sites", "share"), of_fates, over, "no site yet"),
        Facts("The rules", rules),
    ]
    return page_of_run(f"Policy of {run_id}", blocks, place, label, run_id)


def _is_of_table(line: str, clients: Mapping[str, Document]) -> bool:
    """Return whether a sentence says of a client that reported what the table of fates says."""
    name, bracket, _ = line.partition(" (reported): ")
    return bool(bracket) and len(clients) > TOLD_MAX and name in clients


def _round(place: int, run_id: str, row: Document) -> list[Cell]:
    names = ("invited", "reported", "failed", "refused", "lost", "straggler", "carried_in", "num_examples")
    return [
        cell(row["round"], addresses.of_run(place, run_id, f"rounds/{row['round']}")),
        state_cell(row["phase"]),
        *(cell(row["reason"]), cell(row["version"])),
        *(cell(row[name]) for name in names),
        *(size(row["num_bytes"]), duration(row["seconds"])),
    ]


def _exchange(place: int, run_id: str, row: Document) -> list[Cell]:
    return [
        cell(row["round"], addresses.of_run(place, run_id, f"rounds/{row['round']}")),
        *(cell(", ".join(row["kinds"])), state_cell(row["phase"]), cell(row["reason"])),
        *(cell(row[name]) for name in ("nodes", "num_messages", "reported", "missing")),
        *(size(row["bytes_down"]), size(row["bytes_up"]), duration(row["seconds"])),
    ]


def _timeline(record: Document, clients: Mapping[str, Document], now: float) -> Timeline:
    """Return the bars of a round's clients, from its opening to its end."""
    begin, end = float(record["opened_at"]), float(record["ended_at"] or now)
    found = []
    for name, client in islice(clients.items(), BARS_MAX):
        last = float(client["fate_at"] or end)
        end = max(end, last)
        found.append((shown(name), last, [*_parts(begin, client, last)], str(client["fate"])))
    rules = {
        word: float(record[name])
        for name, word in (("deadline", "deadline"), ("linger_by", "linger"), ("grace_by", "grace"))
        if record.get(name) is not None
    }
    note = left_out(len(clients), BARS_MAX, "site", "the table has them")
    return Timeline("Clients in time", charts.bars(found, begin, end, rules), note)


def _parts(begin: float, client: Document, last: float) -> Iterator[tuple[str, float, float]]:
    """Yield the parts of a client's time: wait, download, train, upload, as far as they are known."""
    at = float(client["invited_at"] or begin)
    yield "wait", begin, at
    for name, kind in (("download_seconds", "download"), ("train_seconds", "train")):
        took = min(float(client[name] or 0.0), max(0.0, last - at))
        yield kind, at, at + took
        at += took
    upload = client["upload_begun_at"]
    if upload is not None and at <= float(upload) <= last:
        yield "wait", at, float(upload)
        yield "upload", float(upload), last
    else:
        yield "wait" if upload is None else "upload", at, last


def _in_one_line(sentence: str) -> str:
    """Return a sentence as a text; of the message of a site below its first line what `_concluded` returns."""
    first, _, rest = sentence.partition("\n")
    return shown(f"{first} {_concluded(dedent(rest))}" if rest else first)


def _concluded(message: str) -> str:
    """Return a message; of a traceback the exception, which a cell would cut off behind the frames."""
    has_frames = any(line.startswith(" ") for line in lines_of(message))
    return conclusion(message) if has_frames else message


def _fates(place: int, run_id: str, clients: Mapping[str, Document], json: str) -> TableBlock:
    rows = [
        (
            cell(name, addresses.of_run(place, run_id, "site", name=name)),
            state_cell(client["fate"]),
            cell(client["reason"]),
            cell(_concluded(client["detail"]) or client["unused_because"]),
            cell(client["num_examples"]),
            size(client["num_bytes"]),
            *(duration(client["download_seconds"]), duration(client["train_seconds"])),
            instant(client["fate_at"]),
        )
        for name, client in islice(clients.items(), ROWS_MAX)
    ]
    columns = ("site", "fate", "reason", "detail", "examples", "received", "download", "training", "at")
    return TableBlock("Fates", columns, rows, left_out(len(clients), ROWS_MAX, "site", f"{json} has all"))


def _messages(place: int, run_id: str, messages: Sequence[Document]) -> TableBlock:
    names = [name for name in ("client", "kind", "fate", "reason", "detail") if name in messages[0]]
    rows = [
        [state_cell(str(one[name])) if name == "fate" else cell(one[name]) for name in names]
        for one in messages[:ROWS_MAX]
    ]
    return TableBlock("Messages", names, rows, left_out(len(messages), ROWS_MAX, "message"))


def _trainings(place: int, run_id: str, training: Document) -> Iterator[Block]:
    """Yield the metrics of the round's trainings by site, as far as the sites' policies let them leave."""
    if sites := training.get("sites"):
        names = list(training["metrics"])[:20]
        rows = [
            (
                cell(site, addresses.of_run(place, run_id, "site", name=site)),
                *(cell(sites[site].get(name)) for name in names),
            )
            for site in sorted(sites)[:ROWS_MAX]
        ]
        yield TableBlock("Training by site", ("site", *map(shown, names)), rows)
    if hidden := training.get("not_shown"):
        lines = [f"{shown(site)}: {shown(why)}" for site, why in sorted(hidden.items())[:SENTENCES_MAX]]
        yield Sentences("Not shown", lines)
