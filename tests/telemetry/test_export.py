"""The export of traces and of sites' metrics to a real receiver on loopback, also by an exporter that is killed."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from atoll.operations.views import read_view
from atoll.protocol.paging import Paging
from atoll.server.identity.register import ends_of_processes
from atoll.server.journal.binding import open_database
from atoll.server.journal.holder import running_coordinator
from atoll.telemetry.otlp import FILE
from atoll.telemetry.spans import AGENT_SPANS, spans_of
from tests.cli.federation import ATOLL, TINY, Federation, federation, start_run, wait_for
from tests.cli.invoking import invoke, refused, shown
from tests.telemetry.receiver import Receiver, attributes, receiver
from tests.telemetry.test_pipeline import samples
from tests.telemetry.test_scrape import address_in, fetched
from tests.waiting import BOUND_S

ROUNDS = 6


@pytest.fixture(scope="module", name="site_receiver")
def _site_receiver() -> Iterator[Receiver]:
    """The receiver that site `a` sends the spans of its work to, as its environment says; `b` sends none."""
    with receiver() as it:
        yield it


@pytest.fixture(scope="module", name="ended")
def _ended(tmp_path_factory: pytest.TempPathFactory, site_receiver: Receiver) -> Iterator[Federation]:
    """A federation with an aggregation rank, whose run has ended; its log has the ids of traces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOLL_LOG", "json")
        patch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
        with federation(tmp_path_factory.mktemp("traced"), "aggregators=1", "metrics=127.0.0.1:0") as it:
            it.processes["a"].kill()
            it.processes["a"].wait()
            start_traced(it, site_receiver)
            start_run(it, "tiny", f"rounds={ROUNDS}", "round.cohort_size=2", "round.quorum=2")
            wait_for(lambda: it.run_state("tiny-1") == "finished")
            yield it


def start_traced(it: Federation, site_receiver: Receiver, *settings: str) -> None:
    """Start the agent of site `a`, which sends its spans."""
    process = running_coordinator(it.state)
    assert process is not None
    more = [f"--set={setting}" for setting in settings]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", site_receiver.address)
        it.start("a", "agent", f"{TINY}:task", "--site", "a", "--coordinator", process.address, *more)


def records(it: Federation) -> list[dict[str, Any]]:
    return [shown("round", "show", str(n), "--run", "tiny-1", "--state", it.state) for n in range(1, ROUNDS + 1)]


def points_of(it: Receiver) -> list[tuple[Any, ...]]:
    """Return each point of a site's metric that has arrived."""
    found = it.points.get("atoll.site.metric.value", [])
    return [(tuple(sorted(attributes(p).items())), p.time_unix_nano, p.as_double) for p in found]


def test_each_span_has_the_instants_of_its_record(
    ended: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with receiver() as it:
        outcome = shown("export", "otlp", "tiny-1", "--state", ended.state, "--to", it.address)
        assert (outcome[0]["rows"], outcome[0]["state"]) == (len(it.spans), "finished")
        again = shown("export", "otlp", "tiny-1", "--state", ended.state, "--to", it.address)
        assert again[0]["rows"] == 0
        spans = [span for found in it.spans.values() for span in found]
    by_name: dict[str, list[Any]] = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span)
    found = records(ended)
    assert len({span.trace_id for span in spans}) == ROUNDS
    for record in found:
        (of_round,) = [s for s in by_name["round"] if attributes(s)["atoll.round.number"] == record["round_id"]]
        for nanoseconds, instant in (
            (of_round.start_time_unix_nano, "opened_at"),
            (of_round.end_time_unix_nano, "ended_at"),
        ):
            assert nanoseconds / 1e9 == pytest.approx(record[instant], abs=2e-6)
        clients = {
            attributes(s)["atoll.client.name"]: s for s in by_name["invitation"] if s.trace_id == of_round.trace_id
        }
        assert set(clients) == set(record["clients"])
        for name, row in record["clients"].items():
            assert clients[name].parent_span_id == of_round.span_id
            assert clients[name].start_time_unix_nano / 1e9 == pytest.approx(row["invited_at"], abs=2e-6)
    assert {"selection", "aggregation", "upload"} <= set(by_name)


def test_spans_of_a_site_are_in_the_exported_traces(
    ended: Federation, site_receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once, as a part of the site's invitation, in the order of the work; another site sends none."""
    monkeypatch.chdir(tmp_path)
    names = [name for name, _ in AGENT_SPANS]

    def sent(name: str) -> list[Any]:
        with site_receiver.lock:
            return [found[0] for found in site_receiver.spans.values() if found[0].name == name]

    wait_for(lambda: len(sent("agent.upload")) >= ROUNDS)
    with site_receiver.lock:
        services = {(of["service.name"], of["service.instance.id"]) for of in site_receiver.resources}
    assert services == {("atoll.agent", "a")}
    shown("export", "otlp", "tiny-1", "--state", ended.state, "--to", site_receiver.address)
    assert {len(found) for found in site_receiver.spans.values()} == {1}
    invitations = [span for span in sent("invitation") if attributes(span)["atoll.client.name"] == "a"]
    assert len(invitations) == ROUNDS
    for invitation in invitations:
        parts = {
            name: span
            for name in names
            for span in sent(name)
            if (span.trace_id, span.parent_span_id) == (invitation.trace_id, invitation.span_id)
        }
        assert [*parts] == names
        assert all(not span.status.message for span in parts.values())
        ends = [invitation.start_time_unix_nano]
        for span in parts.values():
            ends += [span.start_time_unix_nano, span.end_time_unix_nano]
        assert all(after > before - 10**6 for before, after in pairwise(ends))  # each by another reading of the clock
    of_run = [span for name in names for span in sent(name) if attributes(span)["atoll.run.id"] == "tiny-1"]
    assert len(of_run) == len(names) * ROUNDS


def test_a_line_of_the_log_names_the_trace_of_its_round(
    ended: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with receiver() as it:
        shown("export", "otlp", "tiny-1", "--state", ended.state, "--to", it.address)
        known = set(it.spans)
    for log, process in (("coordinator", "coordinator"), ("coordinator", "rank"), ("a", "agent"), ("b", "agent")):
        lines = [json.loads(line) for line in ended.log(log).splitlines() if line.startswith("{")]
        lines = [line for line in lines if line["process"] == process]
        about = [line for line in lines if line.get("run") == "tiny-1" and isinstance(line.get("round"), int)]
        assert {line["round"] for line in about} == set(range(1, ROUNDS + 1)), f"{log}: {process}"
        assert {(line["trace_id"], line["span_id"]) for line in about} <= known
        assert not any("trace_id" in line for line in lines if "round" not in line)


def test_a_coordinators_metrics_have_the_end_of_each_ranks_certificate(ended: Federation) -> None:
    """Of one that it has started itself, too, which has no metrics."""
    address = address_in(ended, "coordinator")
    with closing(open_database(ended.state, read_only=True)) as database, database.transaction() as connection:
        expected = {
            f"atoll://{name.replace(' ', '/')}": pytest.approx(end) for name, end in ends_of_processes(connection)
        }
    found = {
        labels["atoll_identity_name"]: value
        for name, labels, value in samples(fetched(address))
        if name == "atoll_certificate_expiry_time_seconds"
    }
    assert found == expected
    assert len(found) == 2


def test_a_killed_export_sends_each_span_once_to_who_knows_its_id(ended: Federation, tmp_path: Path) -> None:
    """Killed again and again, and refused between: the receiver keeps spans by their ids."""
    with receiver() as it:
        command = [str(ATOLL), "export", "otlp", "tiny-1", "--state", str(ended.state), "--to", it.address, "--sites"]
        expected = 0
        for _ in range(3):
            process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            wait_for(lambda: len(it.spans) > expected or process.poll() is not None)  # noqa: B023
            process.kill()
            process.communicate()
            expected = len(it.spans)
            (tmp_path / "atoll-exports" / "otlp" / FILE).unlink(missing_ok=True)  # a crash of the disk, too
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for sent in it.spans.values():
            assert all(span == sent[0] for span in sent)  # a repeated span is the same span
        complete, points = dict(it.spans), points_of(it)
    with receiver() as fresh:
        done = subprocess.run([*command[:-2], fresh.address, "--sites"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert set(fresh.spans) == set(complete)
        once = points_of(fresh)
    assert len(once) == len(set(once)) > 0
    assert set(points) == set(once)
    view = read_view("sites", ended.state, run="tiny-1", paging=Paging(whole=True))
    curves = [
        curve
        for kind in ("evaluation", "training")
        for site in view[kind]["curves"].values()
        for curve in site.values()
    ]
    assert len(once) == sum(map(len, curves))


KILLS_S = (0.4, 1.1, 1.6, 2.2, 0.8, 1.9, 2.7, 1.3)
"""Lives of an export that follows a run [s]: a start takes about one."""


@pytest.mark.long
def test_an_export_that_follows_a_run_and_is_killed_again_and_again_sends_each_once(
    ended: Federation, tmp_path: Path
) -> None:
    """Spans and points: what is repeated is the same, and is of the rounds at the cursor when it was killed."""
    start_run(ended, "followed", "rounds=25", "pause=0.5", "round.cohort_size=2", "round.quorum=2")
    with receiver() as it:
        command = [str(ATOLL), "export", "otlp", "followed-1", "--state", str(ended.state), "--to", it.address]
        command += ["--follow", "--sites"]
        num_kills = 0
        for life in KILLS_S:
            process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            with suppress(subprocess.TimeoutExpired):
                process.wait(life)
            process.kill()
            process.communicate()
            num_kills += process.returncode == -signal.SIGKILL
        assert num_kills == len(KILLS_S), "it follows until the run has ended, or it is killed"
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=BOUND_S)
        assert done.returncode == 0, done.stderr
        assert ended.run_state("followed-1") == "finished"
        for sent in it.spans.values():
            assert all(span == sent[0] for span in sent)
        repeated, longest = sum(len(sent) - 1 for sent in it.spans.values()), 3 + 2 * 4
        assert repeated <= num_kills * longest, "at most the round whose cursor was not stored yet"
        complete, points = set(it.spans), points_of(it)
    with receiver() as fresh:
        again = [*command[:6], "--to", fresh.address, "--sites"]
        done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, timeout=BOUND_S)
        assert done.returncode == 0, done.stderr
        assert set(fresh.spans) == complete
        once = points_of(fresh)
    assert len(once) == len(set(once)) > 0
    assert set(points) == set(once)
    rounds = [shown("round", "show", str(n), "--run", "followed-1", "--state", ended.state) for n in range(1, 26)]
    expected = sum(len(list(spans_of("followed-1", 1, record))) for record in rounds)
    assert len(complete) == expected


def test_a_receiver_that_is_away_is_an_exit_code_and_no_lost_span(
    ended: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("atoll.telemetry.otlp.TIMEOUT_S", 1.0)
    with receiver() as it:
        it.failing = 10**6
        began = time.monotonic()
        result = invoke("export", "otlp", "tiny-1", "--state", ended.state, "--to", it.address)
        assert (result.exit_code, it.spans) == (75, {})
        assert f"{it.address} does not take the spans; the same command continues it" in result.stderr
        assert time.monotonic() - began < 60
        it.failing = 0
        assert shown("export", "otlp", "tiny-1", "--state", ended.state, "--to", it.address)[0]["rows"] == len(it.spans)


def test_mistakes_are_a_sentence_each(ended: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    place = ("--state", ended.state)
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in refused("export", "otlp", "tiny-1", *place)[0]
    assert "got 'ftp://x'" in refused("export", "otlp", "tiny-1", *place, "--to", "ftp://x")[0]
    assert "no run" in refused("export", "otlp", "other", *place, "--to", "http://127.0.0.1:1")[0]


def test_a_killed_agent_loses_the_span_that_is_open_alone(ended: Federation, site_receiver: Receiver) -> None:
    """Its line takes a byte a second, so the second update waits behind the first one while the agent is killed."""

    def names(number: int) -> list[str]:
        with site_receiver.lock:
            spans = [found[0] for found in site_receiver.spans.values()]
        about = [(span, attributes(span)) for span in spans if span.name.startswith("agent.")]
        wanted = ("killed-1", number)
        return [s.name for s, of in about if (of["atoll.run.id"], of["atoll.round.number"]) == wanted]

    ended.processes["a"].kill()
    ended.processes["a"].wait()
    start_traced(ended, site_receiver, "upload_limit=1")
    start_run(ended, "killed", "rounds=2", "round.cohort_size=2", "round.quorum=2")
    every = [name for name, _ in AGENT_SPANS]
    wait_for(lambda: len(names(2)) == 3)
    assert ended.processes["a"].poll() is None
    ended.processes["a"].kill()
    ended.processes["a"].wait()
    assert (names(1), names(2)) == (every, every[:3])
    start_traced(ended, site_receiver)
    wait_for(lambda: names(2) == every)
    wait_for(lambda: ended.run_state("killed-1") == "finished")
