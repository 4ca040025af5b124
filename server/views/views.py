"""The views of runs in JSON types, for the commands on this machine and for remote ones."""

import gc
import time
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from enum import StrEnum
from itertools import pairwise
from operator import itemgetter
from typing import Any

from atoll.ground.printable import count_of, printable_size
from atoll.protocol.json_values import plain
from atoll.protocol.paging import ALL, Paging
from atoll.protocol.settings import effective
from atoll.protocol.vocabulary import ClientId, Fate, RoundId, RunId, RunState, Version
from atoll.server.config.run_changes import changes_of
from atoll.server.exchanges.exchange_summary import summary as summary_of_exchange
from atoll.server.files.version_folder import VersionFolder
from atoll.server.identity.register import Standing
from atoll.server.journal.holder import run_folder
from atoll.server.journal.placement import num_ranks_of
from atoll.server.journal.rows import EvaluationRow, RunRow, SettingsChange, VersionRow
from atoll.server.journal.sources import IN_SUMS, SITE, TRAINING
from atoll.server.names.places import CLIENT
from atoll.server.names.presence import Presence
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.round_summary import summary
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.waiting import TOO_FEW, Missing, wait_of, what_a_pause_waits_for, what_a_run_waits_for
from atoll.server.statistics import results
from atoll.server.views import clients, message_views
from atoll.server.views.history import History, Measured, Numbered
from atoll.server.views.pages import LOOKED_AT_MAX, fits_round, page
from atoll.server.views.privacy import NOTE, guarantee_of
from atoll.server.views.secure_sums import sums_of
from atoll.server.views.sentences import as_json
from atoll.server.views.sites import measurements, meshes, sites
from atoll.server.views.thinning import POINTS_MAX, thinned_metrics
from atoll.task.metrics import LEFT_OUT, values
from atoll.tensors.safetensors_header import read_header

Document = dict[str, Any]

KINDS_OF_SITES = {"evaluation": SITE, "training": TRAINING}
"""Prefix of the sources of each kind of measurement by single sites."""

FATE_ROUNDS, FATE_ROUNDS_MAX = 24, 300
"""Number of the newest rounds with the fates of their clients: by default, and at most."""

ALERT_ROUNDS = 1_000
"""Number of the newest rounds that the rules of alerts look at."""

MESH_ROUNDS = 100
"""Number of the newest rounds in which the use of meshes is looked for."""


class View(StrEnum):
    """Kind of a view."""

    RUNS = "runs"
    RUN = "run"
    ROUNDS = "rounds"
    ROUND = "round"
    CLIENTS = "clients"
    VERSIONS = "versions"
    SITES = "sites"
    STATISTICS = "statistics"
    FATES = "fates"
    SUMS = "sums"
    ALERTS = "alerts"


def look(history: History, view: View, run: str = "", number: int = 0, paging: Paging = ALL) -> Any:
    """Return a view of a state directory.

    Args:
        history: the history of the state directory.
        view: the kind of view.
        run: id or name of the run; empty: the newest run, except for RUN, which needs one.
        number: the round, or the statistics; 0: the newest. Of FATES and SUMS the number of the newest rounds; 0: 24.
        paging: a page of the rows of ROUNDS, CLIENTS or VERSIONS, without faults; and whether the curves of RUN and
            SITES have all points, and whether RUN has neither `metrics` nor `unmeasured`.

    Returns:
        For RUNS and ALERTS a list. For the others an object: for RUN the `document`, and the settings as `toml`; for
        ROUND the record; for ROUNDS, CLIENTS and VERSIONS the id of the `run` and its `rows`; for VERSIONS also the
        `metadata` in the files of the versions; for SITES the metrics of single sites by `evaluation` and `training`,
        and their `meshes`; for FATES the numbers of the `rounds`, and by client and round the fate; for SUMS the secure
        sums of these rounds as `rows`; for STATISTICS a result of `server.statistics`. A run of messages has exchanges
        instead of rounds. A page also has `next`, the cursor of the next one; None: there is none.

    Raises:
        LookupError: there is no such run or round; the message names the known runs.
    """
    if view is View.STATISTICS:
        return results.read(history.path, number)
    if view is View.RUNS:
        return plain([_run(history, row) for row in history.runs()])
    if view is View.ALERTS:
        return plain(_alerts(history))
    if view is View.CLIENTS and not run and not history.runs():
        found = clients.listed(history, None, paging)
        if found["rows"] or history.coordinator() is not None:
            return plain({"run": "", **found})
    if view is View.RUN:
        row = history.run(run)
        return plain({"document": _whole_run(history, row, paging), "toml": effective(row.config)})
    row = run_of(history, run)
    if view is View.ROUND:
        of_messages = row.config.is_of_messages
        return plain(_exchange(history, row, number) if of_messages else _round(history, row.run_id, number))
    return plain({"run": row.run_id, **_of_run(history, view, row, number, paging)})


def _of_run(history: History, view: View, row: RunRow, number: int, paging: Paging) -> Document:
    """Return a view that has the rows of a run."""
    if view is View.VERSIONS:
        return _versions(history, row, paging) | {"metadata": _metadata(history, row.run_id)}
    if view is View.SITES:
        rows_of_sites = history.site_evaluations(row.run_id)
        prefixes = KINDS_OF_SITES.items()
        by = {kind: sites(measurements(rows_of_sites, prefix), whole=paging.whole) for kind, prefix in prefixes}
        records = () if row.config.is_of_messages else history.rounds(row.run_id, most=MESH_ROUNDS)
        return {**by, "meshes": meshes(records)}
    if view is View.CLIENTS:
        return clients.listed(history, row, paging)
    if view is View.FATES:
        return _fates(history, row, number or FATE_ROUNDS)
    if view is View.SUMS:
        return {"rows": _sums(history, row, number or FATE_ROUNDS)}
    return _rounds(history, row, paging)


def measures(evaluations: Iterable[EvaluationRow]) -> dict[int, dict[str, Document]]:
    """Return the values of the metrics by version and source ("server", "clients", or "training" in secure sums).

    The values come from the task's metrics. Before these are computed, two sums count as total and count, and all other
    sums are shown unchanged.
    """
    found: dict[int, dict[str, Document]] = {}
    for row in evaluations:
        if row.statistics is not None:
            two_sums = values({}, row.statistics)
            raw = {name: two_sums[name] if len(sums) in (0, 2) else list(sums) for name, sums in row.statistics.items()}
            found.setdefault(row.version, {})[row.source] = raw | dict(row.values)
    return found


def _curves(history: History, run_id: RunId) -> dict[int, dict[str, Document]]:
    """Return the values of the metrics as `measures`, with thinned curves."""
    was_enabled = gc.isenabled()
    gc.disable()  # its passes over 100,000 evaluations, none of which is garbage, would take half of the time
    try:
        rows = history.measured(run_id)
        return thinned_metrics(
            {source: map(_with_means, sorted(rows[source], key=_version_of)) for source in sorted(rows)}
        )
    finally:
        if was_enabled:
            gc.enable()


_version_of = itemgetter(0)


def _with_means(row: Measured) -> tuple[int, Document]:
    """Return the version of an evaluation and its metrics, and as `measures` the sums that are in no metric."""
    version, statistics, metrics = row
    found: Document = metrics
    if isinstance(statistics, int):  # the metrics are of all sums
        return version, found
    for name, sums in statistics.items():
        if name not in found:
            num = len(sums)
            found[name] = list(sums) if num not in (0, 2) else sums[0] / sums[1] if num and sums[1] else None
    return version, found


def unmeasured(evaluations: Iterable[EvaluationRow]) -> list[Document]:
    """Return the versions without metrics, or with a metric that has no value, with the reason."""
    return [
        {"version": row.version, "source": row.source, "reason": row.detail}
        for row in evaluations
        if row.statistics is None or LEFT_OUT in row.detail
    ]


def run_of(history: History, name: str) -> RunRow:
    """Return the run with this id or name; without a name the newest one.

    Raises:
        LookupError: there is no such run.
    """
    if name:
        return history.run(name)
    runs = history.runs()
    if not runs:
        raise LookupError(f"{history.path} has no run yet")
    return runs[-1]


WAITING = "waiting"
"""State shown for a running run while it waits until time or human action removes the cause."""
NEVER_JOINED = {
    Standing.INVITED: "invited, has not enrolled",
    Standing.MEMBER: "enrolled, has not connected",
    Standing.LAPSED: "its certificate has expired: it needs a new invitation",
}
"""Reasons why a member has never joined a run, by its standing; a revoked one is not missing."""


def _run(history: History, row: RunRow, machine: RunMachine | None = None) -> Document:
    """Return the facts of a run; `wait` says what it waits for, with the missing sites, and then is the cause."""
    wait = _waiting_for(history, row, machine)
    shown = {} if wait is None or row.state is not RunState.RUNNING else {"state": WAITING, "cause": wait["sentence"]}
    return _facts(history, row) | shown | {"wait": wait}


def _waiting_for(history: History, row: RunRow, machine: RunMachine | None) -> Document | None:
    if row.state not in (RunState.RUNNING, RunState.PAUSED):
        return None
    members: Set[ClientId]
    if row.config.is_of_messages:
        ledger = message_views.ledger_of(history, row)
        needed = row.config.round.min_available
        wait, members = message_views.wait_of_program(ledger, needed, row.created_at), ledger.membership.members.keys()
    else:
        machine = machine or history.standing(row.run_id)[0]
        wait, members = wait_of(machine), machine.ledger.membership.members.keys()
    if wait is None:
        return None
    if wait.cause == TOO_FEW:
        wait = replace(wait, missing=(*wait.missing, *_never_joined(history, members)))
    missing = [{"site": one.client, "since": one.since, "why": one.why} for one in wait.missing]
    sentence = wait.sentence()
    return {"cause": wait.cause, "since": wait.since, "missing": missing, "sentence": sentence}


def _never_joined(history: History, joined: Set[ClientId]) -> Iterator[Missing]:
    """Yield the coordinator's members that are not connected and have never joined the run."""
    if (presence := history.presence()) is None:
        return
    known = joined | {one.client for one in presence.clients}
    for member in history.members():
        name = ClientId(member.identity.name)
        if name not in known and (why := NEVER_JOINED.get(member.standing)):
            yield Missing(name, None, why)


def _facts(history: History, row: RunRow) -> Document:
    return {
        "run": row.run_id,
        "name": row.name,
        "task": row.config.task,
        "state": row.state,
        "cause": row.cause,
        "version": history.newest_version(row.run_id),
        "rounds": 0 if row.config.is_of_messages else row.config.rounds,
        "exchanges": history.newest_record(row.run_id) or 0 if row.config.is_of_messages else None,
        "created_at": row.created_at,
        "ended_at": row.ended_at,
        "clocks": history.clocks(),
        "notices": history.notices(),
    }


def _whole_run(history: History, row: RunRow, paging: Paging) -> Document:
    number = _number(history, row.run_id)
    if row.config.is_of_messages:
        settings = {"number": number, "settings": row.config.model_dump(mode="json"), "changes": []}
        return _run(history, row) | message_views.details(history, row) | settings
    machine, num_members = history.standing(row.run_id)
    measured = {} if paging.bare else _measured(history, row.run_id, whole=paging.whole)
    return _run(history, row, machine) | {
        "number": number,
        **measured,
        "best": _best(machine),
        "privacy": guarantee_of(machine, num_members),
        "undecided": machine.undecided,
        "pausing": what_a_pause_waits_for(machine),
        "waiting": _wait(history, row.run_id, machine),
        "name_conflicts": _conflicts(history, row.run_id, machine),
        "settings": row.config.model_dump(mode="json"),
        "changes": [*_changes(history.settings(row.run_id))],
    }


def _measured(history: History, run_id: RunId, *, whole: bool) -> Document:
    """Return the metrics of a run's versions, and the versions that lack some: it looks at every evaluation."""
    is_whole = whole or not history.has_evaluations(run_id, POINTS_MAX)
    return {
        "metrics": measures(history.evaluations(run_id)) if is_whole else _curves(history, run_id),
        "unmeasured": unmeasured(history.unmeasured(run_id)),
    }


def _number(history: History, run_id: RunId) -> int:
    """Return the run number; 0: the state directory is elsewhere."""
    from atoll.protocol.identity.noise_secret import FILE, run_number  # a list of runs needs none of it

    return run_number(history.path, run_id) if (history.path / FILE).is_file() else 0


def _changes(settings: list[SettingsChange]) -> Iterator[Document]:
    """Yield each change of a run's settings: its time, its first round, and the old and new values."""
    for before, after in pairwise(settings):
        values = changes_of(before.config, after.config)
        yield {
            "at": after.at,
            "round": after.round_id,
            "values": {key: {"before": old, "after": new} for key, (old, new) in values.items()},
        }


def _best(machine: RunMachine) -> Document | None:
    """Return the best version with its metric; None: no metric decides, or it has had no value yet."""
    metric, best = machine.rules.best, machine.ledger.best
    if metric is None or best is None:
        return None
    return {"version": best.version, "metric": metric.name, "source": metric.source, "value": best.value}


def _conflicts(history: History, run_id: RunId, machine: RunMachine) -> list[Document]:
    """Return the names of the run's clients, and the ranks, that two processes use now."""
    found = history.conflicts()
    if any(row["kind"] == CLIENT for row in found) and not machine.ledger.membership.members:
        machine = history.machine(run_id)
    members = machine.ledger.membership.members
    return [row for row in found if row["kind"] != CLIENT or row["name"] in members]


def _wait(history: History, run_id: RunId, machine: RunMachine) -> str:
    """Return for which clients or what a run waits, and the names in double use; empty: it does not wait."""
    wait = _plain_wait(history, machine)
    return "; ".join([wait, *(row["sentence"] for row in _conflicts(history, run_id, machine))]) if wait else ""


def _plain_wait(history: History, machine: RunMachine) -> str:
    if machine.ledger.state is RunState.RUNNING and history.coordinator() is None:
        return "no coordinator holds the state directory: start it, and the run continues"
    wait = wait_of(machine)
    return what_a_run_waits_for(machine) + (f"; {wait.sentence()}" if wait is not None else "")


def _round(history: History, run_id: RunId, number: int) -> Document:
    """Return the record of a round; the last sentence of an open one says for which clients it waits."""
    record, (machine, _) = _record(history, run_id, number), history.standing(run_id)
    found = as_json(record) | {"training": _trainings(history, run_id, record)}
    is_open = machine.round is not None and machine.round.record.round_id == record.round_id
    found["arriving"] = _arriving(history, run_id, {record.round_id})
    found["sentences"] += _sentences_of(found["arriving"], "update")
    if record.sums:
        found["training"]["in_sums"] = together = _in_sums(history, run_id, record)
        found["sentences"] += _training_sentence(together)
    if is_open and (wait := _wait(history, run_id, machine)):
        found["sentences"].append(f"{wait[0].upper()}{wait[1:]}.")
    return found


def _exchange(history: History, row: RunRow, number: int) -> Document:
    """Return an exchange with its messages and sentences, and the arriving replies."""
    found = message_views.exchange(history, row, number)
    waiting = {one["number"] for one in found["messages"] if one["fate"] == Fate.WAITING}
    found["arriving"] = _arriving(history, row.run_id, waiting)
    found["sentences"] += _sentences_of(found["arriving"], "reply")
    return found


def _sentences_of(arriving: Iterable[Document], what: str) -> list[str]:
    return [
        f"{row['client']}: {printable_size(row['num_bytes'])} of {printable_size(row['total_bytes'])} of its {what} "
        f"have arrived ({row['num_bytes'] / max(1, row['total_bytes']):.0%})."
        for row in arriving
    ]


def _arriving(history: History, run_id: RunId, numbers: Set[int]) -> list[Document]:
    """Return the arriving updates of a round, or replies to messages."""
    presence = history.presence() or Presence()
    rows = (each for each in presence.arriving if each.run == run_id and each.round in numbers)
    return [{"client": row.client, "num_bytes": row.num_bytes, "total_bytes": row.total_bytes} for row in rows]


def _trainings(history: History, run_id: RunId, record: RoundRecord) -> Document:
    """Return the metrics of a round's trainings by site, which belong to the version that it started from."""
    of_version = history.site_evaluations(run_id, record.base_version)
    found = sites(measurements((row for row in of_version if is_of_round(row, record)), TRAINING))
    return {key: found[key] for key in ("sites", "metrics", "not_shown")}


def _in_sums(history: History, run_id: RunId, record: RoundRecord) -> Document:
    """Return the metrics of the training that the round's secure sums have added up, and the number of members."""
    of_round = (row for row in history.evaluations(run_id) if row.source == IN_SUMS and row.at == record.ended_at)
    for row in of_round:
        return {"metrics": measures([row])[row.version][IN_SUMS], "members": row.num_clients}
    return {"metrics": {}, "members": 0}


def _training_sentence(together: Document) -> list[str]:
    values = (f"{name} {value:.4g}" for name, value in together["metrics"].items() if isinstance(value, float | int))
    listed = ", ".join(values)
    return [f"Training of {count_of(together['members'], 'member')}, in sums: {listed}."] if listed else []


def is_of_round(row: EvaluationRow, record: RoundRecord) -> bool:
    """Return whether a training belongs to this round, not to another one that began from the same version."""
    client = record.clients.get(ClientId(row.source.removeprefix(TRAINING)))
    return client is not None and client.fate_at == row.at


def _rounds(history: History, row: RunRow, paging: Paging) -> Document:
    """Return the rounds of a run; of a run of messages its exchanges; the open ones last."""
    if paging.count is None:
        stored = history.summaries(row.run_id, paging, most=None)
        return {"rows": [document for _, document in [*stored, *_open_rounds(history, row, paging)]]}
    most = LOOKED_AT_MAX + 1 if paging.is_filtered else paging.count + 1
    return page(_rounds_from(history, row, paging, most), paging, fits_round(paging))


def _rounds_from(history: History, row: RunRow, paging: Paging, most: int) -> Iterator[Numbered]:
    opened = _open_rounds(history, row, paging) if paging.last else []
    yield from opened
    stored = history.summaries(row.run_id, paging, most)
    yield from stored
    if not paging.last and len(stored) < most:
        yield from _open_rounds(history, row, paging)


def _open_rounds(history: History, row: RunRow, paging: Paging) -> list[Numbered]:
    """Return the summaries of the open rounds on a page, in the order of reading."""
    found: list[tuple[int, dict[str, Fate], Document]] = []
    if row.config.is_of_messages:
        for exchange in message_views.open_exchanges(history, row):
            fates = {str(one.message.client_id): one.fate for one in exchange.sent}
            found.append((exchange.number, fates, summary_of_exchange(exchange)))
    elif (record := history.open_round(row.run_id)) is not None:
        fates = {str(name): one.fate for name, one in record.clients.items()}
        found.append((record.round_id, fates, summary(record)))
    if paging.client:
        wanted = {paging.fate} if paging.fate else set(Fate)
        found = [one for one in found if one[1].get(paging.client) in wanted]
    if paging.after:
        found = [one for one in found if (one[0] < paging.number if paging.last else one[0] > paging.number)]
    return [(str(number), document) for number, _, document in sorted(found, reverse=paging.last)]


def _fates(history: History, row: RunRow, most: int) -> Document:
    """Return the fates of the clients in the newest rounds, an open one last; a run of messages has none."""
    if row.config.is_of_messages:
        return {"rounds": [], "clients": {}}
    most = min(most, FATE_ROUNDS_MAX)
    by_round = history.fates(row.run_id, most)
    if (record := history.open_round(row.run_id)) is not None:
        by_round[record.round_id] = {str(name): str(client.fate) for name, client in record.clients.items()}
    rounds = sorted(by_round)[-most:]
    found: dict[str, dict[int, str]] = {}
    for number in rounds:
        for name, fate in by_round[number].items():
            found.setdefault(name, {})[number] = fate
    return {"rounds": rounds, "clients": dict(sorted(found.items()))}


def _sums(history: History, row: RunRow, most: int) -> list[Document]:
    """Return the secure sums of the newest rounds; a run of messages has none."""
    most = min(most, FATE_ROUNDS_MAX)
    return [] if row.config.is_of_messages else sums_of(history.rounds(row.run_id, most=most)[-most:])


def _alerts(history: History) -> list[Document]:
    from atoll.server.views.alerts import RunNow, alerts_of  # a coordinator itself makes no view

    rows = history.runs()
    free_since = max((row.ended_at for row in rows if row.ended_at is not None), default=0.0)  # a queued run began then
    runs = [
        RunNow(row.run_id, row.state, row.cause, max(row.created_at, free_since), _ended_rounds(history, row))
        for row in rows
    ]
    ends, conditions = history.ends_of_certificates(), history.conditions()
    return alerts_of(runs, ends, conditions, time.time(), is_attended=history.is_attended())


def _ended_rounds(history: History, row: RunRow) -> list[Document] | None:
    """Return the summaries of the newest rounds of a running run; None: no rule looks at them."""
    if row.state is not RunState.RUNNING or row.config.is_of_messages:
        return None
    return [summary for _, summary in reversed(history.summaries(row.run_id, Paging(last=True), ALERT_ROUNDS))]


def _record(history: History, run_id: RunId, number: int) -> RoundRecord:
    if number:
        return history.round(run_id, RoundId(number))
    if not (records := history.rounds(run_id, most=1)):
        raise LookupError(f"run {run_id} has had no round yet")
    return records[-1]


def _versions(history: History, row: RunRow, paging: Paging) -> Document:
    is_page = paging.count is not None
    if row.config.is_of_messages:
        return {"rows": [], "next": None} if is_page else {"rows": []}  # its program keeps its models itself
    run_id = row.run_id
    rows = history.versions(run_id, paging, paging.count + 1 if paging.count is not None else None)
    numbers = [one.version for one in rows]
    between = (min(numbers), max(numbers)) if is_page and numbers else None
    measured, parts = measures(history.evaluations(run_id, between)), _parts(history, run_id)
    best = history.standing(run_id)[0].ledger.best
    is_here = history.path.exists()
    shown = (
        _version(one, parts.get(one.version), measured, is_here=is_here)
        | {"best": best is not None and best.version == one.version}
        for one in rows
    )
    if not is_page:
        return {"rows": [*shown]}
    return page(((str(one["version"]), one) for one in shown), paging, lambda _: True)


def _metadata(history: History, run_id: RunId) -> dict[str, str]:
    path = VersionFolder(run_folder(history.path, run_id)).version_path(Version(0))
    return (read_header(path)[1] if path.exists() else {}) | note_of_privacy(history, run_id)


def note_of_privacy(history: History, run_id: RunId) -> dict[str, str]:
    """Return the entry of an exported model's metadata with the guarantee of its run; empty: it has none."""
    if history.run(run_id).config.privacy is None:
        return {}
    guarantee = guarantee_of(*history.standing(run_id))
    return {} if guarantee is None else {NOTE: guarantee["sentence"]}


def _parts(history: History, run_id: RunId) -> dict[int, int]:
    """Return the versions on disk, each with its number of stored parts."""
    folder = run_folder(history.path, run_id)
    store, num_ranks = VersionFolder(folder), num_ranks_of(folder)
    return {v: 1 if store.version_path(v).exists() else max(1, num_ranks) for v in store.versions()}


def _version(
    row: VersionRow, parts: int | None, measured: dict[int, dict[str, Document]], *, is_here: bool
) -> Document:
    """Return a version as a row; whether its file is kept is known where the state directory is."""
    return {
        "version": row.version,
        "digest": row.digest,
        "num_bytes": row.num_bytes,
        "created_at": row.created_at,
        "kept": parts is not None if is_here else None,
        "parts": parts or 0,
        "metrics": measured.get(row.version, {}),
    }
