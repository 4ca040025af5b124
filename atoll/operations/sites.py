"""A site's records in the state directory of its agent: requests, decisions, spool, budgets, peers.

They are read alone, but for the decision of a person on a run that has asked.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.ground.printable import instead_of, printable
from atoll.operations.faults import CommandError
from atoll.operations.reporter import waiting_for
from atoll.protocol.run_names import RunNotNamed, only_named

if TYPE_CHECKING:
    from atoll.client.policy.history import PolicyHistory, RunTerms
    from atoll.server.audit.reading import Source

Document = dict[str, Any]

SHOWN_MAX = 80
"""Characters of the operator's terms that a message quotes."""


def agent_folder(state: Path | None) -> Path:
    """Return the state directory of an agent, which must exist; None: the only one in the current folder.

    Raises:
        CommandError: the directory is not an agent's; or, where none is named, there is none or there are several.
    """
    from atoll.client.policy.database import NAME

    if state is None:
        found = sorted(path.parent for path in Path().glob(f"atoll-agent*/{NAME}"))
        if len(found) == 1:
            return found[0]
        here = f"several are here: {', '.join(map(str, found))}" if found else "none is in the current directory"
        raise CommandError(f"name the agent's state directory with --state DIR; {here}")
    if not (state / NAME).is_file():
        raise CommandError(f"{state} is not an agent's state directory: it has no {NAME}; name another with --state")
    return state


@contextmanager
def opened_requests(folder: Path, *, read_only: bool = False) -> "Iterator[PolicyHistory]":
    """Open the agent's record of the runs in the block; its agent may hold the lock of the file for a moment."""
    from atoll.client.policy.history import BUSY_S, NAME, PolicyHistory

    with (
        waiting_for(f"the lock of {folder / NAME}", f"up to {BUSY_S:g} s for each reading and writing"),
        closing(PolicyHistory(folder, read_only=read_only)) as history,
    ):
        yield history


def requests_at(folder: Path, *, read_only: bool = False) -> list[Document]:
    """Return the runs that have asked a site, with the decision on each, as `atoll site list --json`.

    Args:
        folder: the agent's state directory.
        read_only: whether the schema of the file stays, too.

    Raises:
        OSError: the file cannot be read.
    """
    with opened_requests(folder, read_only=read_only) as history:
        return [in_plain_values(terms) for terms in history.runs()]


def in_plain_values(terms: "RunTerms") -> Document:
    """Return a run that has asked, and its terms, in plain values."""
    return {
        "run": terms.run_id,
        "task": terms.task,
        "standing": str(terms.standing),
        "algorithm": terms.algorithm,
        "codec": terms.codec,
        "local": terms.local,
        "metrics": terms.metrics,
        "secure": terms.secure or None,
        "terms": terms.fingerprint,
        "asked_at": terms.asked_at,
        "decided_at": terms.decided_at,
    }


def run_asked(history: "PolicyHistory", run: str) -> str:
    """Return the id of a run that has asked, which is named by its id or, if only one has that name, by its name.

    Raises:
        CommandError: no such run has asked here, or several have.
    """
    known = [terms.run_id for terms in history.runs()]
    try:
        return only_named(run, ((run_id, run_id.rpartition("-")[0]) for run_id in known))
    except RunNotNamed as error:
        several = any(run_id.rpartition("-")[0] == run for run_id in known)
        fault = str(error) if several else f"run {run!r} has not asked here{instead_of(run, known)}"
        raise CommandError(fault) from None


def decide(
    history: "PolicyHistory", run_id: str, standing: str, *, terms: str = "", seen: str = "", by: str = ""
) -> Document:
    """Approve or reject a run that has asked a site, and write the decision to the site's log; return its terms.

    The actor of the log is the operating system's user of this process.

    Args:
        history: the agent's record of the runs; its agent may run.
        run_id: the run.
        standing: `approved` or `rejected`.
        terms: the fingerprint of the terms that the person has seen; empty: any.
        seen: the standing that the person has seen; empty: any.
        by: the person, where the user of this process acts for others; empty: the user.

    Raises:
        CommandError: the run has not asked, asks on other terms, or was decided about since.
    """
    from atoll.client.policy.decide import Standing
    from atoll.client.policy.history import DecidedMeanwhile, NoSuchRun, OtherTerms
    from atoll.operations.local_audit import record_at_site

    standing_seen = Standing(seen) if seen else None
    try:
        found = history.decided(run_id, Standing(standing), time.time(), fingerprint=terms, seen=standing_seen)
    except NoSuchRun:
        raise CommandError(f"run {run_id!r} has not asked here, or was forgotten: nothing is {standing}") from None
    except OtherTerms:
        what = f"run {run_id} does not ask on the terms {terms[:SHOWN_MAX]!r}: nothing is {standing}"
        raise CommandError(what, "`atoll site list` shows its present terms") from None
    except DecidedMeanwhile as error:
        now = f"it is {error.terms.standing} now, and was {seen} when you looked"
        raise CommandError(f"run {run_id} has changed meanwhile: {now}; nothing is {standing}") from None
    record_at_site(history.path.parent, f"site.{standing}", run_id, f"terms {found.fingerprint}", printable(by))
    return in_plain_values(found)


def decision_in_words(terms: Document) -> str:
    """Return a decision as a sentence, with the terms that it covers; `terms` are as `decide` returns them."""
    training = f"{terms['algorithm']}, codec {codec_of(terms)}" if terms["algorithm"] else "evaluations"
    metrics = f"metrics {terms['metrics']}"
    if terms["metrics"].startswith("statistics "):
        training, metrics = "statistics of its data", terms["metrics"].removeprefix("statistics ")
    metrics += ", in secure sums" if terms["secure"] else ""
    covered = f"task {terms['task']} with {training}, {metrics}, local = {terms['local']}"
    return f"run {terms['run']} is {terms['standing']}, for {covered}"


def codec_of(terms: Document) -> str:
    """Return the codec as a person reads it; `-` for a run that has only asked for evaluations, and sends no update."""
    return (terms["codec"] or "plain") if terms["algorithm"] else "-"


def budgets_at(folder: Path, policy: Path | None = None, *, read_only: bool = False) -> Document:
    """Return the privacy budgets of a site's data, as `atoll site budgets --json`.

    Args:
        folder: the agent's state directory.
        policy: the site's policy, with the budgets; None: those of the ledger are returned.
        read_only: whether the schema of the file stays, too.

    Raises:
        CommandError: the ledger is damaged, or cannot be read.
        ConfigError: the policy is not valid.
    """
    from atoll.client.policy.budgets.report import read_budgets
    from atoll.client.policy.database import BUSY_S, NAME, HistoryUnusable
    from atoll.operations.lost_ledger import privacy_of

    of_site = privacy_of(policy)
    path = Path(of_site.ledger) if of_site is not None and of_site.ledger else folder
    with waiting_for(f"the lock of {path / NAME}", f"up to {BUSY_S:g} s"):
        try:
            found = read_budgets(path, folder, [] if of_site is None else of_site.data, read_only=read_only)
        except HistoryUnusable as error:
            raise CommandError(str(error)) from None
    return {"ledger": str(path / NAME), "budgets": [asdict(each) for each in found]}


def peers_at(folder: Path, *, read_only: bool = False) -> list[Document]:
    """Return the sites that are pinned or distrusted at a site, as `atoll site peers --json`; arguments as above."""
    from atoll.client.policy.database import PolicyDatabase
    from atoll.client.policy.promise_store import PromiseStore
    from atoll.client.site.peers import PeersFile
    from atoll.protocol.secure.site_key import fingerprint

    known = PeersFile(folder).read()
    with closing(PolicyDatabase(folder, read_only=read_only)) as database:
        seen = PromiseStore(database).peers
    newest: dict[str, int] = {}
    for key, chain in seen.items():
        newest[fingerprint(key)] = max(newest.get(fingerprint(key), 0), chain.count)
    forked = {fingerprint(key) for key in seen.forked}
    pinned = [
        {
            "site": name,
            "standing": "pinned",
            "fingerprint": digits,
            "sessions": newest.get(digits),
            "forked": digits in forked,
        }
        for name, digits in known.pinned.items()
    ]
    nothing = {"fingerprint": None, "sessions": None, "forked": False}
    distrusted = [{"site": name, "standing": "distrusted", **nothing} for name in known.distrusted]
    return sorted([*pinned, *distrusted], key=lambda row: str(row["site"]))


def spool_at(folder: Path) -> list[Document]:
    """Return the finished updates that wait for the coordinator's answer: run, round, bytes, costs, since when."""
    from atoll.client.disk.spool import waiting_in

    return [
        {
            "run": manifest.run_id,
            "round": manifest.round_id,
            "num_bytes": entry.num_bytes,
            "num_examples": manifest.num_examples,
            "is_masked": bool(entry.terms),
            "train_seconds": entry.costs.train_seconds,
            "at": _written_at(entry.path),
        }
        for manifest, entry in waiting_in(folder / "spool")
    ]


def _written_at(path: Path) -> float | None:
    """Return when a file was written [s since the epoch]; None: it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def conditions_at(folder: Path) -> list[Document]:
    """Return the conditions that a site's agent reports (`[notify]`), as far as they last; or that no agent runs."""
    from atoll.client.disk.state_directory import holder_of
    from atoll.protocol.notices.book_file import conditions_shown

    if holder_of(folder) is None:
        said = f"no agent runs with {folder}: nothing trains here, and finished updates wait in the spool"
        row = {"condition": "AtollAgentDisconnected", "subject": str(folder), "run": "", "level": "warning"}
        return [row | {"sentence": said, "docs": "docs/monitoring.md#atollagentdisconnected"}]
    return [
        {
            **{"condition": str(one.condition), "subject": one.subject, "run": "", "level": one.level},
            **{"sentence": one.sentence, "docs": "docs/on-call.md#conditions-of-an-agent"},
        }
        for one in conditions_shown(folder)
    ]


@contextmanager
def opened_decisions(folder: Path) -> "Iterator[Source]":
    """Open the log of a site's decisions for reading in the block.

    Raises:
        AuditUnusable: there is no such log.
    """
    from atoll.client.policy.decisions import NAME
    from atoll.server.audit.reading import Source

    with waiting_for(f"the lock of the log {folder / NAME}", "until its holder has written"):
        source = Source.of_folder(folder / NAME)
    yield source
