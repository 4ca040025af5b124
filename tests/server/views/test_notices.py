"""The notices of a coordinator: for each condition one sentence with what is wrong, where, and a command; no data."""

from typing import Any

import pytest

from atoll.protocol.identity.names import COORDINATOR, Identity, Role
from atoll.protocol.notices.notice import Condition
from atoll.protocol.vocabulary import ClientId, FailureReason, RoundId, RunState
from atoll.server.clock import apart, jumped
from atoll.server.identity.register import Member, Standing
from atoll.server.rounds.events import (
    ClientFailed,
    ClientLost,
    DiskShort,
    LossReason,
    PauseRequested,
    RoundDue,
    StopRequested,
)
from atoll.server.rounds.run_rules import WaitRules
from atoll.server.views import notices
from atoll.server.views.notices import Place
from tests.server.rounds.test_cohort_round import Drive

PLACE, DAY = Place("/srv/atoll", "--state /srv/atoll"), 86400.0
NOW = 1_800_000_000.0
SECRET = "KeyError: patient 4711 weighs 80.5 kg"


def of_run(drive: Drive) -> dict[Condition, str]:
    found = [*notices.of_run("digits-1", drive.machine.ledger.state, drive.machine, PLACE)]
    assert all(each.run == "digits-1" for each in found)
    return {each.condition: each.sentence for each in found}


def drive(**policy: Any) -> Drive:
    fields = {"cohort_size": 2, "selection_timeout": 60.0, "deadline": 600.0, "retry": 0} | policy
    return Drive(rules={"wait": WaitRules(60.0, "pause")}, **fields)


def failed(**policy: Any) -> Drive:
    it = drive(**policy)
    it.join("ab")
    it.do(RoundDue())
    it.draw("ab")
    for client in "ab":
        it.do(ClientFailed(ClientId(client), RoundId(1), FailureReason.TRAINING_FAILED, SECRET), 5.0)
    return it


def test_a_running_run_that_lacks_nothing_has_no_notice() -> None:
    it = drive()
    it.join("ab")
    it.do(RoundDue())
    assert of_run(it) == {}


def test_a_failed_run_is_told_with_the_reason_and_two_commands() -> None:
    it = failed()
    assert it.machine.ledger.state is RunState.FAILED
    assert SECRET in it.machine.ledger.cause, "what a site has said may hold data"
    assert of_run(it) == {
        Condition.RUN_FAILED: "run digits-1 is failed at version 0, as in round 1 the quorum could no longer be "
        "reached: `atoll run show digits-1 --state /srv/atoll` has the cause, `atoll run resume digits-1 --state "
        "/srv/atoll` continues it once the cause is removed"
    }


def test_a_run_that_pauses_itself_is_told_without_what_a_site_has_said() -> None:
    sentence = of_run(failed(on_failure="pause"))[Condition.RUN_PAUSED]
    assert "as in round 1 the quorum could no longer be reached" in sentence
    assert "`atoll run resume digits-1 --state /srv/atoll` continues it" in sentence
    assert SECRET not in sentence


def test_a_run_that_its_operator_pauses_or_stops_is_told() -> None:
    it = drive()
    it.do(RoundDue())
    it.do(PauseRequested("maintenance"), 1.0)
    assert Condition.RUN_PAUSED in of_run(it)
    it.do(StopRequested("over"), 2.0)
    assert "`atoll run resume digits-1 --state /srv/atoll` reopens it" in of_run(it)[Condition.RUN_STOPPED]


def test_a_run_that_has_waited_in_vain_names_the_missing_sites() -> None:
    it = drive()
    it.join("ab")
    it.do(ClientLost(ClientId("b"), LossReason.LEASE_EXPIRED), 1.0)
    it.do(RoundDue(), 2.0)
    while it.machine.ledger.state is RunState.RUNNING:
        assert it.machine.deadline is not None
        it.tick(it.machine.deadline - 1000.0)
    assert "missing: b; it resumes by itself" in of_run(it)[Condition.RUN_PAUSED]


def test_a_finished_run_is_told_with_the_export() -> None:
    it = drive()
    [notice] = notices.of_run("digits-1", RunState.FINISHED, it.machine, PLACE)
    assert "`atoll model export --run digits-1 --out model.safetensors --state /srv/atoll`" in notice.sentence
    [of_messages] = notices.of_run("chat-1", RunState.FINISHED, None, PLACE)
    assert "`atoll run show chat-1 --state /srv/atoll`" in of_messages.sentence


def test_an_approval_that_a_run_waits_for_names_the_site_and_its_command() -> None:
    it = drive()
    it.join("ab")
    it.do(RoundDue())
    it.draw("ab")
    it.do(ClientFailed(ClientId("b"), RoundId(1), FailureReason.AWAITS_APPROVAL, f"approval: {SECRET}"), 5.0)
    assert of_run(it)[Condition.APPROVAL] == (
        "run digits-1 waits for the approval of site b: its operator types there `atoll site approve digits-1`; "
        "`atoll site list` shows the terms first"
    )


def test_a_full_disk_is_told_in_the_words_of_run_list() -> None:
    it = drive()
    it.join("ab")
    it.do(RoundDue())
    it.do(DiskShort("12 MB do not fit"), 5.0)
    sentence = of_run(it)[Condition.DISK]
    assert "run digits-1 is waiting for room on disk since 1970-01-01 00:16:45 UTC" in sentence
    assert sentence.endswith("12 MB do not fit: free some, and it continues by itself")


def test_a_disk_below_its_limit() -> None:
    assert [*notices.of_disk(2**30, 2**30, PLACE)] == []
    [notice] = notices.of_disk(5 * 10**8, 10**9, PLACE)
    assert "the disk of /srv/atoll has 500.0 MB free, less than 1.0 GB (notify.disk)" in notice.sentence
    assert "`atoll run delete RUN --state /srv/atoll`" in notice.sentence


def test_an_absent_site_is_told_with_the_time_and_what_to_do() -> None:
    notice = notices.of_absent("north", NOW, 3600.0, PLACE)
    assert (notice.condition, notice.subject, notice.hold) == (Condition.AWAY, "north", 3600.0)
    assert "site north is away since 2027-01-15 08:00:00 UTC" in notice.sentence
    assert "`atoll client revoke north --state /srv/atoll`" in notice.sentence


@pytest.mark.parametrize(
    ("identity", "left", "standing", "said"),
    [
        (Identity(Role.CLIENT, "north"), 10.0, Standing.MEMBER, ""),
        (Identity(Role.CLIENT, "north"), 8.0, Standing.MEMBER, ""),
        (Identity(Role.CLIENT, "north"), 7.0, Standing.MEMBER, "of site north ends at 2027-01-22"),
        (Identity(Role.CLIENT, "north"), -1.0, Standing.LAPSED, "of site north has ended at 2027-01-14"),
        (Identity(Role.CLIENT, "north"), 1.0, Standing.INVITED, ""),
        (Identity(Role.OPERATOR, "anna"), 1.0, Standing.MEMBER, ""),
        (Identity(Role.AGGREGATOR, "0"), 1.0, Standing.MEMBER, "`atoll client invite 0 --role aggregator --state"),
        (COORDINATOR, 1.0, Standing.MEMBER, "of this coordinator ends at 2027-01-16"),
    ],
)
def test_a_certificate_that_ends_is_told_in_the_last_quarter_of_its_life(
    identity: Identity, left: float, standing: Standing, said: str
) -> None:
    until = NOW + left * DAY
    found = [*notices.of_member(Member(identity, standing, until - 30 * DAY, until), NOW, PLACE)]
    assert bool(found) == bool(said)
    assert said in "".join(each.sentence for each in found)


def test_an_end_of_a_certificate_and_the_time_after_it_are_two_messages() -> None:
    member = Member(Identity(Role.CLIENT, "north"), Standing.MEMBER, NOW - 29 * DAY, NOW + DAY)
    keys = {each.key for at in (NOW, NOW + 2 * DAY) for each in notices.of_member(member, at, PLACE)}
    assert len(keys) == 2


def test_an_authority_is_told_half_a_year_before_its_end() -> None:
    assert [*notices.of_authority(NOW + 181 * DAY, NOW, PLACE)] == []
    assert "ends" in next(iter(notices.of_authority(NOW + 179 * DAY, NOW, PLACE))).sentence
    assert "has ended" in next(iter(notices.of_authority(NOW - 1, NOW, PLACE))).sentence


def test_clocks_are_told_in_the_words_of_the_log() -> None:
    sentence = apart(NOW + 3600, NOW)
    [notice] = notices.of_clocks({"journal": sentence})
    assert (notice.sentence, notice.is_logged) == (sentence, True)
    assert notices.of_jump(jumped(-3600.0, NOW), NOW).sentence.startswith("this machine's clock was set back by 1 h")


def test_a_broken_chain_is_told_in_the_words_of_the_log() -> None:
    assert [*notices.of_audit("", PLACE)] == []
    [notice] = notices.of_audit("audit-0.jsonl was changed", PLACE)
    assert (notice.sentence, notice.level, notice.subject) == ("audit-0.jsonl was changed", "error", "/srv/atoll/audit")


def test_another_version_of_a_site_is_told_with_both() -> None:
    sentence = notices.of_software("north", "atoll 0.8", "atoll 0.9", PLACE).sentence
    assert sentence.startswith("site north runs atoll 0.9 now, atoll 0.8 before")
