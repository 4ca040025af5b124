"""The audit log's lines about rounds: of a charge, and of a run that is recovered without one."""

from atoll.protocol.vocabulary import RunId
from atoll.server.audit.actions import Action
from atoll.server.audit.rounds import entries_of, spent_of
from atoll.server.rounds.events import AuditCharge
from atoll.server.rounds.run_machine import RunMachine
from tests.server.rounds.test_cohort_round import Drive
from tests.server.rounds.test_privacy import closed, private, rules


def test_a_charge_whose_line_a_kill_has_taken_is_in_the_line_of_the_recovery() -> None:
    drive = private(rules())
    closed(drive)
    [charge] = [each for each in drive.effects if isinstance(each, AuditCharge)]
    [entry] = entries_of(RunId("run-1"), [charge])
    assert (entry.action, entry.object_) == (Action.PRIVACY_CHARGE, "run-1 round 1")
    who, _, spent = entry.outcome.partition("; ")
    assert who == "2 clients"
    assert spent.startswith("the most used in 1 sum: epsilon ")
    assert spent.endswith(" of 4 at delta 1e-05")
    assert spent_of(drive.machine) == f"; {spent}"


def test_a_run_without_privacy_has_spent_nothing() -> None:
    assert spent_of(Drive().machine) == ""
    assert spent_of(RunMachine(private(rules()).rules)).startswith("; the most used in 0 sums: epsilon 0 of 4")
