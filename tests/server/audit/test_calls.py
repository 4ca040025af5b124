"""Which calls are written, and which are soon only counted."""

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
    """The context of a call that has ended: nothing but what it says."""

    def details(self):
        return "no"


def written(tmp_path, calls):
    """The events of calls (method, run, code) by mallory, and what was withheld."""
    with AuditLog(tmp_path / "audit", time.time) as log:
        audit = CallAudit(log)
        for method, run, code in calls:
            audit._said(method, run, Ended(), MALLORY, code)
    events = [line.event for line in events_of(Source.of_state(tmp_path))]
    return [event for event in events if event.actor == "mallory"], [e for e in events if e.action == "audit.withheld"]


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,  # whoever breaks off at once is as fast as who is refused
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ],
)
def test_admin_calls_that_come_to_nothing_are_soon_only_counted(tmp_path, code):
    said, (withheld,) = written(tmp_path, [(INVITE, "", code)] * 1000)
    assert [event.action for event in said] == ["call"] * BURST
    assert withheld.outcome == f"{1000 - BURST} call {INVITE} by mallory"


def test_another_run_each_time_is_no_other_call(tmp_path):
    calls = [(STOP, f"run-{n}", grpc.StatusCode.PERMISSION_DENIED) for n in range(1000)]
    said, (withheld,) = written(tmp_path, calls)
    assert [event.object for event in said] == [f"{STOP} run-{n}" for n in range(BURST)]
    assert withheld.object == f"{1000 - BURST} lines"


def test_every_admin_call_that_was_answered_is_written(tmp_path):
    said, withheld = written(tmp_path, [(STOP, "digits-1", grpc.StatusCode.OK)] * 100)
    assert (len(said), withheld) == (100, [])
