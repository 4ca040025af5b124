"""The log while it is written: no caller waits, nothing is lost, strangers cannot fill it."""

import threading
import time

import pytest

from atoll.protocol.audit.chain import read_line
from atoll.server.audit import log as log_module
from atoll.server.audit.actions import Action
from atoll.server.audit.budget import BURST
from atoll.server.audit.log import AuditLog, Caller, acting
from atoll.server.audit.reading import Source, events_of, verify
from tests.waiting import BOUND_S

ADA = Caller("ada", "operator")


@pytest.fixture
def log(tmp_path):
    with AuditLog(tmp_path / "audit", time.time) as log:
        yield log


def events(tmp_path):
    return [line.event for line in events_of(Source.of_state(tmp_path))]


def test_events_are_written_in_their_order_and_signed(log, tmp_path):
    for number in range(1000):
        log.record(Action.RUN_STOP, f"run-{number}", "no time", {"model": "ab"}, caller=ADA)
    log.flush()
    assert [event.object for event in events(tmp_path)] == [f"run-{n}" for n in range(1000)]
    found = verify(Source.of_state(tmp_path))
    assert (found.unsigned, found.faults) == (0, [])
    assert log.checkpoint == found.last_checkpoint.checkpoint
    event = events(tmp_path)[0]
    assert (event.actor, event.role, event.action, event.outcome) == ("ada", "operator", "run.stop", "no time")
    assert event.digests == {"model": "ab"}


def test_the_actor_is_the_caller(log, tmp_path):
    log.record(Action.RUN_ADD, "one")
    with acting(ADA):
        log.record(Action.RUN_ADD, "two")
    log.record(Action.RUN_ADD, "three")
    log.flush()
    assert [event.actor for event in events(tmp_path)] == ["coordinator", "ada", "coordinator"]


@pytest.mark.real
def test_a_checkpoint_follows_after_a_while(log, tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "SIGN_S", 0.01)
    log.record(Action.RUN_ADD, "one")
    until = time.monotonic() + BOUND_S
    while log.checkpoint is None:
        assert time.monotonic() < until
        time.sleep(0.005)
    assert verify(Source.of_state(tmp_path)).unsigned == 0


def test_strangers_are_counted_when_the_log_ends(tmp_path):
    mallory = Caller("192.0.2.1", "anonymous")
    with AuditLog(tmp_path / "audit", time.time) as log:
        for _ in range(1000):
            log.record_bounded(Action.CALL_REFUSE, "/atoll.v1.Admin/StopRun", "PERMISSION_DENIED", caller=mallory)
    *written, last = events(tmp_path)
    assert [event.actor for event in written] == ["192.0.2.1"] * BURST
    assert (last.action, last.object) == ("audit.withheld", f"{1000 - BURST} lines")
    assert last.outcome == f"{1000 - BURST} call.refuse /atoll.v1.Admin/StopRun by 192.0.2.1"
    assert verify(Source.of_state(tmp_path)).faults == []


def test_many_threads_lose_nothing(log, tmp_path):
    def record(name):
        for number in range(300):
            log.record(Action.CALL, f"{name} {number}")

    threads = [threading.Thread(target=record, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.flush()
    objects = [event.object for event in events(tmp_path)]
    assert len(objects) == 1200
    for name in "abcd":
        assert [object_ for object_ in objects if object_[0] == name] == [f"{name} {n}" for n in range(300)]


@pytest.mark.real
def test_a_disk_that_is_full_for_a_while_costs_nothing(log, tmp_path, monkeypatch, caplog):
    real, failed = log._files.append, threading.Event()

    def full_once(given, *, sign=False):
        if not failed.is_set():
            failed.set()
            raise OSError(28, "no room")
        real(given, sign=sign)

    monkeypatch.setattr(log._files, "append", full_once)
    monkeypatch.setattr(log_module, "RETRY_S", 0.001)
    log.record(Action.RUN_ADD, "one")
    log.flush()
    assert [event.object for event in events(tmp_path)] == ["one"]
    assert "the audit log cannot be written, its lines wait" in caplog.text


def test_events_beyond_the_queue_of_a_full_disk_are_counted(log, tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "WAITING_MAX", 10)
    real, may_write = log._files.append, threading.Event()

    def slow(given, *, sign=False):
        may_write.wait(30)
        real(given, sign=sign)

    monkeypatch.setattr(log._files, "append", slow)
    for number in range(100):
        log.record(Action.CALL, f"call {number}")
    may_write.set()
    log.flush()
    log.record(Action.RUN_ADD, "after")
    log.flush()
    written = events(tmp_path)
    (lost,) = [event for event in written if event.action == "audit.lost"]
    assert int(lost.object.split()[0]) + sum(event.action == "call" for event in written) == 100


def test_closing_signs_the_rest(tmp_path):
    with AuditLog(tmp_path / "audit", time.time) as log:
        log.record(Action.COORDINATOR_STOP)
    *_, (_, data) = Source.of_state(tmp_path).lines()
    assert read_line(data).event is None
