"""The spans of a site's own work: their ids, and a receiver that is away, refuses, or cannot be reached at all."""

import logging
import sys
import time
from typing import Any

import pytest

from atoll.cli.serving.spans import sender_of
from atoll.client.phases import Phase, Phases, fault_of
from atoll.client.work.runner import RunnerFailed
from atoll.protocol.log_fields import note_run
from atoll.protocol.trace_ids import span_id, trace_id
from atoll.protocol.vocabulary import FailureReason, RunId
from atoll.telemetry import agent_spans
from atoll.telemetry.agent_spans import AgentSpans, span_of
from atoll.telemetry.spans import AGENT_SPANS, spans_of
from tests.cli.federation import wait_for
from tests.telemetry.receiver import receiver
from tests.telemetry.test_spans import record
from tests.waiting import BOUND_S

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def phase(name: str = "train", round_id: int = 3, **given: Any) -> Phase:
    return Phase(name, 5, "digits-1", round_id, **{"begun": 10.0, "ended": 12.0, **given})


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)


def test_a_sites_span_is_a_part_of_its_invitation_with_an_id_that_anybody_can_compute() -> None:
    exported = list(spans_of("digits-1", 5, record()))
    (invitation,) = [span for span in exported if span.name == "invitation"]
    own = [span_of("north", phase(name.removeprefix("agent."))) for name, _ in AGENT_SPANS]
    assert [span.name for span in own] == [name for name, _ in AGENT_SPANS]
    assert {(span.trace, span.parent) for span in own} == {(trace_id(5, "digits-1", 3), invitation.id)}
    assert [span.id for span in own] == [span_id(5, "digits-1", 3, name, "north") for name, _ in AGENT_SPANS]
    again = span_of("north", phase(), 2)
    assert again.id == span_id(5, "digits-1", 3, "agent.train.2", "north")
    assert len({span.id for span in (*exported, *own, again)}) == len(exported) + len(own) + 1


def test_a_fault_is_a_word_and_has_nothing_of_the_data() -> None:
    failed = RunnerFailed(FailureReason.TRAINING_FAILED, "row 17: Jane Doe, 1961")
    assert fault_of(failed) == "training_failed"
    assert fault_of(OSError(28, "No space left on device: /data/jane")) == "OSError"
    assert span_of("north", phase(fault="training_failed")).error == "training_failed"


def test_phases_are_of_rounds_with_a_number_and_their_durations_of_a_clock_that_never_jumps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phases, found, run = Phases(), list[Phase](), RunId("phased-1")
    key = ("round", run, 4)
    phases.note("load", key, time.monotonic())  # nobody listens
    phases.listeners.append(found.append)
    phases.note("load", key, time.monotonic())  # no invitation yet, so no number
    note_run(run, 77)
    phases.note("load", ("version", run, 4), time.monotonic())
    assert found == []
    now = time.monotonic()
    monkeypatch.setattr(time, "time", lambda: 1e9)
    phases.note("load", key, now - 7.0, now - 5.0)
    (load,) = found
    assert (load.name, load.run_number, load.run_id, load.round_id, load.fault) == ("load", 77, run, 4, "")
    assert load.ended - load.begun == pytest.approx(2.0)
    assert load.ended == pytest.approx(1e9 - 5.0, abs=1.0)
    with pytest.raises(RunnerFailed), phases.timed("spool", key):
        raise RunnerFailed(FailureReason.DISK_FULL, "")
    assert (found[-1].name, found[-1].fault) == ("spool", "disk_full")


def test_a_receiver_that_refuses_costs_one_warning_and_no_span(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_spans, "AGAIN_S", 0.02)
    monkeypatch.setattr(agent_spans, "TIMEOUT_S", 0.2)
    with receiver() as it, caplog.at_level(logging.INFO):
        monkeypatch.setenv(ENDPOINT, it.address)
        it.failing = 10**6
        with sender_of("north") as sender:
            assert sender is not None
            for number in range(3):
                sender.note(phase(round_id=number))
            wait_for(lambda: "does not take" in caplog.text)
            wait_for(lambda: it.failing < 10**6 - 3)
            it.failing = 0
            wait_for(lambda: len(it.spans) == 3)
            sender.note(phase(round_id=3))
            sender.note(phase(round_id=3))  # its training was repeated
        assert len(it.spans) == 5, "the last ones are sent when the agent ends"
        assert {len(found) for found in it.spans.values()} == {1}
    lines = [record.getMessage() for record in caplog.records]
    place = it.address.removeprefix("http://")
    assert lines[0] == f"the spans of this site's work are sent to {place}"
    assert lines[1].startswith(f"{place} does not take this site's spans, and rounds continue without it: ")
    assert lines[2:] == [f"{place} takes this site's spans again"]


def test_a_receiver_that_is_not_there_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue is bounded, its oldest spans are dropped, and the agent ends in time."""
    monkeypatch.setattr(agent_spans, "QUEUE_MAX", 10)
    monkeypatch.setenv(ENDPOINT, "http://user:secret@127.0.0.1:1")
    sender = AgentSpans("north", {ENDPOINT: "http://user:secret@127.0.0.1:1"})
    begun = time.monotonic()
    for number in range(50):
        sender.note(phase(round_id=number))
    assert len(sender._queue) == 10
    assert [span.attributes["atoll.round.number"] for span in sender._queue] == [*range(40, 50)]
    assert sender._num_dropped == 40
    sender.close()
    assert time.monotonic() - begun < BOUND_S, "neither a phase nor the end waits for it"
    assert "secret" not in caplog.text


@pytest.mark.parametrize("variable", ["OTEL_SDK_DISABLED=true", "OTEL_TRACES_EXPORTER=none", f"{ENDPOINT}="])
def test_an_agent_sends_none_unless_its_environment_says_so(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setenv(*variable.split("="))
    with sender_of("north") as sender:
        assert sender is None


def test_a_missing_package_is_one_sentence_and_ends_no_agent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "atoll.telemetry.agent_spans")
    with caplog.at_level(logging.WARNING), sender_of("north") as sender:
        assert sender is None
    what = "opentelemetry-exporter-otlp-proto-http is not installed: pip install 'atoll[telemetry]', or unset it"
    assert [record.getMessage() for record in caplog.records] == [f"{ENDPOINT} is set, but no spans are sent: {what}"]
