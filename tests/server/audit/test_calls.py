"""The calls that are recorded, and those that are soon only counted."""

import time

import grpc
import pytest

from atoll.server.audit.budget import BURST
from atoll.server.audit.calls import CallAudit
from atoll.server.audit.log import AuditLog, Caller
from atoll.server.audit.reading import Source, events_of

MALLORY = Caller("mallory", "client")
INVITE, STOP = "/atoll.v1.Admin/Invite", "/atoll.v1.Admin/StopRun"


class Ended:
    """The context of a call that has ended, with its details alone."""

    def details(self):
        return "no"


def written(tmp_path, calls):
    """Return the events of calls (method, run, code) by mallory, and those about withheld lines."""
    with AuditLog(tmp_path / "audit", time.time) as log:
        audit = CallAudit(log)
        for method, run, code in calls:
            audit._record(method, run, Ended(), MALLORY, code)
    events = [line.event for line in events_of(Source.of_state(tmp_path))]
    return [event for event in events if event.actor == "mallory"], [e for e in events if e.action == "audit.withheld"]


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,  # a call that is broken off at once is as cheap as a refused one
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ],
)
def test_admin_calls_that_fail_are_soon_only_counted(tmp_path, code):
    recorded, (withheld,) = written(tmp_path, [(INVITE, "", code)] * 1000)
    assert [event.action for event in recorded] == ["call"] * BURST
    assert withheld.outcome == f"{1000 - BURST} call {INVITE} by mallory"


def test_another_run_each_time_is_no_other_call(tmp_path):
    calls = [(STOP, f"run-{n}", grpc.StatusCode.PERMISSION_DENIED) for n in range(1000)]
    recorded, (withheld,) = written(tmp_path, calls)
    assert [event.object for event in recorded] == [f"{STOP} run-{n}" for n in range(BURST)]
    assert withheld.object == f"{1000 - BURST} lines"


def test_every_admin_call_that_was_answered_is_written(tmp_path):
    recorded, withheld = written(tmp_path, [(STOP, "digits-1", grpc.StatusCode.OK)] * 100)
    assert (len(recorded), withheld) == (100, [])
