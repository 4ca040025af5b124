"""The views of runs in JSON types, for the commands on this machine and for remote ones."""

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from atoll.ground.printable import count_of, printable_size
from atoll.protocol.json_values import plain
from atoll.protocol.settings import effective
from atoll.protocol.vocabulary import TERMINAL, ClientId, Fate, RoundId, RunId, RunState, Version
from atoll.server.config.run_changes import changes_of
from atoll.server.files.version_folder import VersionFolder
from atoll.server.identity.register import Standing
from atoll.server.journal.holder import run_folder
from atoll.server.journal.journal import EvaluationRow, RunRow, SettingsChange, VersionRow
from atoll.server.journal.placement import num_ranks_of
from atoll.server.journal.sources import IN_SUMS, SITE, TRAINING
from atoll.server.names.places import CLIENT
from atoll.server.names.presence import Presence
from atoll.server.rounds.membership import Membership
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.waiting import TOO_FEW, Missing, wait_of, what_a_pause_waits_for, what_a_run_waits_for, why_not
from atoll.server.statistics import results
from atoll.server.views import message_views
from atoll.server.views.attendance import attended
from atoll.server.views.history import History
from atoll.server.views.privacy import NOTE, guarantee_of
from atoll.server.views.sentences import as_json, summary
from atoll.server.views.sites import measurements, meshes, sites
from atoll.task.metrics import LEFT_OUT, values
from atoll.tensors.safetensors_header import read_header

Document = dict[str, Any]

KINDS_OF_SITES = {"evaluation": SITE, "training": TRAINING}
"""Prefix of the sources of each kind of measurement by single sites."""


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


def look(history: History, view: View, run: str = "", number: int = 0) -> Any:
    """Return a view of a state directory.

    Args:
        history: the history of the state directory.
        view: the kind of view.
        run: id or name of the run; empty: the newest run, except for RUN, which needs one.
        number: the round, or the statistics; 0: the newest.

    Returns:
        For RUNS a list. For the others an object: for RUN the `document`, and the settings as `toml`; for ROUND the
        record; for ROUNDS, CLIENTS and VERSIONS the id of the `run` and its `rows`; for VERSIONS also the `metadata`
        in the files of the versions; for SITES the metrics of single sites by `evaluation` and `training`, and
        their `meshes`; for STATISTICS a result of `server.statistics`. A run of messages has exchanges instead of
        rounds.

    Raises:
        LookupError: there is no such run or round; the message names the known runs.
    """
    if view is View.STATISTICS:
        return results.read(history.path, number)
    if view is View.RUNS:
        return plain([_run(history, row) for row in history.runs()])
    if view is View.CLIENTS and not run and not history.runs():
        rows = attended((), history.presence(), history.members(), "there is no run yet")
        if rows or history.coordinator() is not None:
            return plain({"run": "", "rows": rows})
    row = history.run(run) if view is View.RUN else run_of(history, run)
    if view is View.RUN:
        return plain({"document": _whole_run(history, row), "toml": effective(row.config)})
    if view is View.ROUND:
        of_messages = row.config.is_of_messages
        return plain(_exchange(history, row, number) if of_messages else _round(history, row.run_id, number))
    if view is View.VERSIONS:
        rows = _versions(history, row)
        return plain({"run": row.run_id, "rows": rows, "metadata": _metadata(history, row.run_id)})
    if view is View.SITES:
        rows_of_sites = history.site_evaluations(row.run_id)
        by = {kind: sites(measurements(rows_of_sites, prefix)) for kind, prefix in KINDS_OF_SITES.items()}
        records = () if row.config.is_of_messages else history.rounds(row.run_id)
        return plain({"run": row.run_id, **by, "meshes": meshes(records)})
    return plain({"run": row.run_id, "rows": _rows(history, row, view)})


def _rows(history: History, row: RunRow, view: View) -> list[Document]:
    """Return the rounds or the clients of a run; for a run of messages its exchanges or its nodes."""
    if view is View.CLIENTS:
        rows = message_views.clients(history, row) if row.config.is_of_messages else _clients(history, row.run_id)
        over = f"the run is {row.state}" if row.state in TERMINAL or row.state is RunState.QUEUED else ""
        return attended(rows, history.presence(), history.members(), over)
    if row.config.is_of_messages:
        return message_views.exchanges(history, row)
    return _rounds(history, row.run_id)


def newest_version(history: History, run_id: RunId) -> int:
    """Return the version of the current global model; 0: the initial one."""
    return max((row.version for row in history.versions(run_id)), default=0)


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
        machine = machine or history.machine(row.run_id)
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
        "version": newest_version(history, row.run_id),
        "rounds": 0 if row.config.is_of_messages else row.config.rounds,
        "exchanges": history.newest_record(row.run_id) or 0 if row.config.is_of_messages else None,
        "created_at": row.created_at,
        "ended_at": row.ended_at,
        "clocks": history.clocks(),
        "notices": history.notices(),
    }


def _whole_run(history: History, row: RunRow) -> Document:
    if row.config.is_of_messages:
        settings = {"settings": row.config.model_dump(mode="json"), "changes": []}
        return _run(history, row) | message_views.details(history, row) | settings
    evaluations = history.evaluations(row.run_id)
    machine = history.machine(row.run_id)
    return _run(history, row, machine) | {
        "metrics": measures(evaluations),
        "unmeasured": unmeasured(evaluations),
        "best": _best(machine),
        "privacy": guarantee_of(machine),
        "undecided": machine.undecided,
        "pausing": what_a_pause_waits_for(machine),
        "waiting": _wait(history, machine),
        "name_conflicts": _conflicts(history, machine),
        "settings": row.config.model_dump(mode="json"),
        "changes": [*_changes(history.settings(row.run_id))],
    }


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


def _conflicts(history: History, machine: RunMachine) -> list[Document]:
    """Return the names of the run's clients, and the ranks, that two processes use now."""
    members = machine.ledger.membership.members
    return [row for row in history.conflicts() if row["kind"] != CLIENT or row["name"] in members]


def _wait(history: History, machine: RunMachine) -> str:
    """Return for which clients or what a run waits, and the names in double use; empty: it does not wait."""
    wait = _plain_wait(history, machine)
    return "; ".join([wait, *(row["sentence"] for row in _conflicts(history, machine))]) if wait else ""


def _plain_wait(history: History, machine: RunMachine) -> str:
    if machine.ledger.state is RunState.RUNNING and history.coordinator() is None:
        return "no coordinator holds the state directory: start it, and the run continues"
    wait = wait_of(machine)
    return what_a_run_waits_for(machine) + (f"; {wait.sentence()}" if wait is not None else "")


def _round(history: History, run_id: RunId, number: int) -> Document:
    """Return the record of a round; the last sentence of an open one says for which clients it waits."""
    record, machine = _record(history, run_id, number), history.machine(run_id)
    found = as_json(record) | {"training": _trainings(history, run_id, record)}
    is_open = machine.round is not None and machine.round.record.round_id == record.round_id
    found["arriving"] = _arriving(history, run_id, {record.round_id})
    found["sentences"] += _sentences_of(found["arriving"], "update")
    if record.sums:
        found["training"]["in_sums"] = together = _in_sums(history, run_id, record)
        found["sentences"] += _training_sentence(together)
    if is_open and (wait := _wait(history, machine)):
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


def _rounds(history: History, run_id: RunId) -> list[Document]:
    return [summary(record) for record in history.rounds(run_id)]


def _record(history: History, run_id: RunId, number: int) -> RoundRecord:
    if number:
        return history.round(run_id, RoundId(number))
    records = history.rounds(run_id)
    if not records:
        raise LookupError(f"run {run_id} has had no round yet")
    return records[-1]


def _clients(history: History, run_id: RunId) -> list[Document]:
    membership, rounds = history.membership(run_id), history.rounds(run_id)
    conflicts = {row["name"]: row["sentence"] for row in history.conflicts() if row["kind"] == CLIENT}
    invited = Counter(client_id for record in rounds for client_id in record.clients)
    used = Counter(c for record in rounds for c, client in record.clients.items() if client.used_in is not None)
    return [
        _client(client_id, membership)
        | {"invited": invited[client_id], "used": used[client_id], "name_conflict": conflicts.get(client_id, "")}
        for client_id in sorted(membership.members)
    ]


def _client(client_id: ClientId, membership: Membership) -> Document:
    """Return a client as a row: `why_not` says why it cannot be invited now, `seen_at` is its newest sign of life."""
    member = membership.members[client_id]
    trouble, is_connected = member.trouble, membership.is_connected(client_id)
    failure = None if trouble is None else {"reason": trouble.reason, "detail": trouble.detail, "at": trouble.at}
    return {
        "client": client_id,
        "connected": is_connected,
        "available": membership.is_available(client_id),
        "why_not": why_not(membership, client_id),
        "seen_at": member.seen_at or None,
        "software": member.software,
        "last_failure": failure,
        "evaluates": membership.evaluates(client_id),
        "num_examples": member.profile.num_examples,
        "label": member.profile.label,
        "download_seconds": member.download_seconds,
        "train_seconds": member.train_seconds,
        "upload_seconds": member.upload_seconds,
    }


def _versions(history: History, row: RunRow) -> list[Document]:
    if row.config.is_of_messages:
        return []  # its program keeps its models itself
    run_id = row.run_id
    measured, parts = measures(history.evaluations(run_id)), _parts(history, run_id)
    best = history.machine(run_id).ledger.best
    return [
        _version(one, parts.get(one.version), measured) | {"best": best is not None and best.version == one.version}
        for one in history.versions(run_id)
    ]


def _metadata(history: History, run_id: RunId) -> dict[str, str]:
    path = VersionFolder(run_folder(history.path, run_id)).version_path(Version(0))
    return (read_header(path)[1] if path.exists() else {}) | note_of_privacy(history, run_id)


def note_of_privacy(history: History, run_id: RunId) -> dict[str, str]:
    """Return the entry of an exported model's metadata with the guarantee of its run; empty: it has none."""
    if history.run(run_id).config.privacy is None:
        return {}
    guarantee = guarantee_of(history.machine(run_id))
    return {} if guarantee is None else {NOTE: guarantee["sentence"]}


def _parts(history: History, run_id: RunId) -> dict[int, int]:
    """Return the versions on disk, each with its number of stored parts."""
    folder = run_folder(history.path, run_id)
    store, num_ranks = VersionFolder(folder), num_ranks_of(folder)
    return {v: 1 if store.version_path(v).exists() else max(1, num_ranks) for v in store.versions()}


def _version(row: VersionRow, parts: int | None, measured: dict[int, dict[str, Document]]) -> Document:
    return {
        "version": row.version,
        "digest": row.digest,
        "num_bytes": row.num_bytes,
        "created_at": row.created_at,
        "kept": parts is not None,
        "parts": parts or 0,
        "metrics": measured.get(row.version, {}),
    }
