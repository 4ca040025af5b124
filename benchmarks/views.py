"""The cost of each view of a run with a million members and 100,000 kept rounds: `python -m benchmarks.views`.

The journal is built by rows, not by rounds: a member costs its part of a page, a round its record of three clients, a
version and an evaluation. Each view is then taken in a process of its own, as a command takes it, beside the same view
of a thousand members and rounds. The seconds are those of opening the database, the view and its JSON, without the
import of Python's modules, which does not depend on the run; `core_seconds` are those of the processor, which busy
neighbours do not change; the megabytes are the process's largest resident set. Then a dashboard of each state serves
every page that its links lead to, once before it counts and five times for its figures: seconds of the fastest answer,
processor seconds of the mean one. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.protocol.paging import COUNT_MAX, Paging
from atoll.protocol.vocabulary import (
    AbandonReason,
    ClientId,
    CloseReason,
    Digest,
    Fate,
    Phase,
    RoundId,
    RunId,
    RunState,
    Version,
)
from atoll.server.config.run import RunConfig
from atoll.server.journal.codec import encode_ledger_without_members, encode_record
from atoll.server.journal.journal import Journal
from atoll.server.journal.member_rows import pages_of
from atoll.server.journal.rows import Batch, EvaluationRow, RecordRow, RunChange, RunRow, Snapshot, VersionRow
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.members.member import Member, Profile, Trouble
from atoll.server.members.membership import Membership
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.record import ClientRecord, RoundRecord
from atoll.server.rounds.run_rules import RunRules
from atoll.server.views.history import History
from atoll.server.views.view_process import Viewer
from atoll.server.views.views import View, look
from benchmarks.pages import Session, crawled, start_dashboard
from benchmarks.processes import Processes

RUN = RunId("many-1")
COHORT = 3
AT_ONCE = 1_000
SECONDS_MAX, MEGABYTES_MAX = 0.3, 300
ANSWERS = 60
"""Number of views that the lasting process answers."""

PAGE_BYTES_MAX = 1_000_000
READS = 5
"""Number of reads of each page."""

TIMES = 3
"""Number of processes for each view, of which the fastest counts: other processes share the cores."""

VIEWS: dict[str, tuple[View, int, Paging]] = {
    "runs": (View.RUNS, 0, Paging()),
    "run": (View.RUN, 0, Paging()),
    "run without metrics": (View.RUN, 0, Paging(bare=True)),
    "rounds": (View.ROUNDS, 0, Paging(COUNT_MAX, last=True)),
    "rounds of a client": (View.ROUNDS, 0, Paging(COUNT_MAX, client="client-0000007")),
    "rounds with a lost client": (View.ROUNDS, 0, Paging(COUNT_MAX, last=True, fate="lost")),
    "round": (View.ROUND, 0, Paging()),
    "clients": (View.CLIENTS, 0, Paging(100)),
    "clients after a name": (View.CLIENTS, 0, Paging(100, after="client-0000500")),
    "clients with a prefix": (View.CLIENTS, 0, Paging(100, prefix="client-00007")),
    "failed clients": (View.CLIENTS, 0, Paging(100, state="failed")),
    "versions": (View.VERSIONS, 0, Paging(COUNT_MAX, last=True)),
    "sites": (View.SITES, 0, Paging()),
}


def build(folder: Path, members: int, rounds: int) -> None:
    """Write the state directory of an ended run with these many members and kept rounds, with one lost in fifty."""
    names = [ClientId(f"client-{number:07d}") for number in range(members)]
    rules = RunRules(rounds=rounds, policy=StragglerPolicy(cohort_size=COHORT))
    with StateDirectory.open(folder) as state:
        journal = Journal(state)
        journal.add_run(RunRow.new(RUN, RunConfig(name="many", task="tasks:none", rounds=rounds), rules, 1.0))
        for first in range(1, rounds + 1, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, rounds + 1))
            records = [record_of(number, names) for number in numbers]
            journal.commit(
                Batch(
                    records=[RecordRow(RUN, encode_record(record), record) for record in records],
                    versions=[VersionRow(RUN, Version(n), Digest(f"{n:064x}"), 1000, float(n)) for n in numbers],
                    evaluations=[evaluation_of(number) for number in numbers],
                )
            )
        membership = Membership({name: member_of(number) for number, name in enumerate(names)})
        ledger = Ledger(RunState.FINISHED, "all rounds are committed", float(rounds), Version(rounds), Digest("f" * 64))
        ledger.next_round, ledger.membership = RoundId(rounds + 1), membership
        written = membership.unwritten.take(membership.members, 1)
        snapshot = Snapshot(RUN, 1, 1.0, encode_ledger_without_members(ledger), written.first, written.num_members)
        pages = [*pages_of(RUN, 1, written, membership.members)]
        ended = RunChange(RUN, RunState.FINISHED, ledger.cause, float(rounds))
        journal.commit(Batch(snapshots=[snapshot], members=pages, changes=[ended]))


def record_of(number: int, names: list[ClientId]) -> RoundRecord:
    """Return the record of a round with three clients; each fiftieth round was abandoned, with a client lost."""
    is_lost = number % 50 == 0
    record = RoundRecord(RoundId(number), Version(number - 1), float(number), COHORT, 1, COHORT)
    record.num_candidates = len(names)
    for place in range(COHORT):
        client = ClientRecord(number + 0.1, Fate.LOST if is_lost else Fate.REPORTED, number + 0.5)
        if not is_lost:
            client.digest, client.num_examples, client.used_in = (
                Digest(f"{number:060x}{place:04x}"),
                10,
                RoundId(number),
            )
            client.num_examples, client.num_bytes = 10, 1_000
        record.clients[names[(number * COHORT + place) % len(names)]] = client
    record.drawn_at, record.closed_at, record.ended_at = number + 0.1, number + 0.6, number + 0.9
    record.close_reason = CloseReason.ENOUGH
    record.phase = Phase.ABANDONED if is_lost else Phase.COMMITTED
    if is_lost:
        record.abandon_reason, record.detail = AbandonReason.BELOW_QUORUM, "no update is in"
    else:
        record.version = Version(number)
    return record


def evaluation_of(number: int) -> EvaluationRow:
    """Return the evaluation of a version by the server."""
    value = number / (number + 10)
    return EvaluationRow(RUN, Version(number), "server", {"accuracy": (value, 1.0)}, 1, "", 1.0, {"accuracy": value})


def member_of(number: int) -> Member:
    """Return a member that has trained; each fifth has failed."""
    member = Member(Profile(10 + number % 90, "ab"[number % 2]), software="atoll 0.1.0", seen_at=float(number))
    member.download_seconds, member.train_seconds, member.upload_seconds = 0.1, 1.0, 0.2
    if number % 5 == 0:
        member.trouble = Trouble("train_failed", "no memory", float(number))
    return member


def taken(folder: Path, name: str) -> dict[str, Any]:
    """Take a view in this process."""
    view, number, paging = VIEWS[name]
    begin, of_core = time.perf_counter(), time.process_time()
    found = look(History(folder), view, "" if view is View.RUNS else RUN, number, paging)
    num_bytes = len(json.dumps(found))
    seconds, core_seconds = time.perf_counter() - begin, time.process_time() - of_core
    status = Path("/proc/self/status").read_text()  # ru_maxrss would have the memory of the parent before its exec
    megabytes = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    times = {"seconds": round(seconds, 4), "core_seconds": round(core_seconds, 4)}
    return {**times, "megabytes": round(megabytes), "kilobytes": num_bytes // 1000}


def measured(folder: Path, name: str) -> dict[str, Any]:
    """Take a view in processes of their own, and return the fastest."""
    command = [sys.executable, "-m", "benchmarks.views", "--folder", str(folder), "--view", name]
    tries = (subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(TIMES))
    found: list[dict[str, Any]] = [json.loads(text) for text in tries]
    return min(found, key=lambda one: one["seconds"])


def pages(folder: Path) -> tuple[dict[str, dict[str, float]], float]:
    """Return the figures of each page of a dashboard of this state directory, and the dashboard's megabytes."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="atoll-views-") as scratch, Processes(Path(scratch)) as processes:
        session = Session(start_dashboard(processes, "dashboard", folder))
        for address in crawled(session.read):
            seconds, before = list[float](), processes.usage("dashboard").cpu_s
            for _ in range(READS):
                begin = time.perf_counter()
                num_bytes = len(session.read(address))
                seconds.append(time.perf_counter() - begin)
            core_seconds = (processes.usage("dashboard").cpu_s - before) / READS
            found[address] = {"seconds": round(min(seconds), 4), "core_seconds": round(core_seconds, 4)}
            found[address]["kilobytes"] = num_bytes // 1000
        return found, round(processes.usage("dashboard").rss_bytes_max / 1e6)


async def answered(folder: Path) -> float:
    """Return the median time in which the coordinator's lasting process answers `run` and `rounds` [s]."""
    viewer, times = Viewer(folder), []
    try:
        for number in range(ANSWERS + 1):
            name = ("run", "rounds")[number % 2]
            view, _, paging = VIEWS[name]
            begin = time.perf_counter()
            async for _ in viewer.look(view, RUN, 0, replace(paging, count=10) if paging.count else paging):
                pass
            times.append(time.perf_counter() - begin)
    finally:
        await viewer.close()
    return statistics.median(times[1:])  # the first one starts the process


def sizes(members: int, rounds: int) -> Iterator[tuple[str, int, int]]:
    """Yield the two sizes that are compared."""
    yield "small", min(1_000, members), min(1_000, rounds)
    yield "large", members, rounds


def main() -> None:
    """Build both state directories, take each view of each, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="with --view: take one view of this state directory")
    parser.add_argument("--pages", action="store_true", help="the pages of a dashboard alone")
    parser.add_argument("--view", choices=sorted(VIEWS))
    chosen = parser.parse_args()
    if chosen.view:
        print(json.dumps(taken(chosen.folder, chosen.view)))
        return
    found: dict[str, dict[str, Any]] = {name: {} for name in VIEWS}
    lasting, of_pages = 0.0, dict[str, dict[str, dict[str, float]]]()
    with tempfile.TemporaryDirectory(prefix="atoll-views-") as scratch:
        for size, members, rounds in sizes(chosen.members, chosen.rounds):
            begin = time.perf_counter()
            build(Path(scratch) / size, members, rounds)
            print(
                f"{members:,} members and {rounds:,} rounds: built in {time.perf_counter() - begin:.1f} s", flush=True
            )
            if size == "small":
                build(Path(scratch) / "tiny", 3, 20)
                lasting = asyncio.run(answered(Path(scratch) / "tiny"))
                print(f"the lasting process answers a small run in {lasting * 1000:.0f} ms (median)", flush=True)
            for name in () if chosen.pages else VIEWS:
                found[name][size] = measured(Path(scratch) / size, name)
                print(f"{name}: {found[name][size]}", flush=True)
            of_pages[size], of_dashboard = pages(Path(scratch) / size)
            for address, figures in of_pages[size].items():
                print(f"{address}: {figures}", flush=True)
            print(f"the dashboard has {of_dashboard} MB", flush=True)
    print(json.dumps(verdict(chosen, found, of_pages["large"], lasting) | {"views": found, "pages": of_pages}))


def verdict(
    chosen: argparse.Namespace,
    found: Mapping[str, Mapping[str, Mapping[str, float]]],
    of_pages: Mapping[str, Mapping[str, float]],
    lasting: float,
) -> dict[str, Any]:
    """Return the worst figures of the views and of the pages, and whether they hold their bars."""
    worst = {
        key: max((each["large"][key] for each in found.values() if each), default=0)
        for key in ("seconds", "core_seconds", "megabytes")
    }
    page = {key: max(one[key] for one in of_pages.values()) for key in ("seconds", "core_seconds", "kilobytes")}
    is_held = worst["core_seconds"] <= SECONDS_MAX and worst["megabytes"] <= MEGABYTES_MAX
    are_pages_held = page["core_seconds"] <= SECONDS_MAX and 1000 * page["kilobytes"] <= PAGE_BYTES_MAX
    facts = {"benchmark": "views", "members": chosen.members, "rounds": chosen.rounds}
    verdicts = {"is_held": is_held, "are_pages_held": are_pages_held, "worst": worst, "worst_page": page}
    return facts | verdicts | {"lasting_seconds": round(lasting, 4)}


if __name__ == "__main__":
    main()
