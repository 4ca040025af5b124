"""Each fault happens, and has its effect where it is expected."""

from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest

from atoll.client.session.events import Asked, JobFailed
from atoll.protocol.vocabulary import FailureReason, Fate, LossReason, Phase
from atoll.server.rounds.events import ClientLost, Commit, CoordinatorStarted, Invite
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.run_rules import RunRules
from tests.histories.faults import COORDINATOR_DIES, PRESETS, Faults
from tests.histories.history import History
from tests.histories.judge import judged
from tests.histories.scenario import BUDGETS, SUMS, Scenario, random_scenario
from tests.histories.world import World

HOW_BAD = {field.name for field in fields(Faults) if field.default not in (0, 0.0)}
"""Fields of the severity of a fault, not of its frequency."""
NOT_COUNTED = {"lag", "offline", *HOW_BAD}
POLICY = StragglerPolicy(cohort_size=4, quorum=1, deadline=60.0, retry=100, late="next_round", max_staleness=4)


def world_with(seed: int = 0, *, rounds: int = 12, policy: StragglerPolicy = POLICY, **faults: float) -> History:
    """Judge a world with these faults and no others."""
    scenario = Scenario(rules=RunRules(policy=policy, rounds=rounds), num_clients=6, faults=Faults(**faults))  # type: ignore[arg-type]
    return judged(seed, scenario)


def lost(history: History) -> Counter[LossReason]:
    return Counter(step.event.reason for step in history.steps if isinstance(step.event, ClientLost))


def remarks(history: History, text: str) -> list[float]:
    return [remark.at for remark in history.remarks if text in remark.what]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["none", "network", "crashes", "disk", "clock"])
def test_a_preset_has_its_own_faults_and_no_others(preset: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += judged(seed, preset=preset).faults
    assert set(seen) <= PRESETS[preset]
    assert len(seen) >= 0.6 * len(PRESETS[preset] - NOT_COUNTED)


def test_presets_differ_in_their_faults_and_in_nothing_else() -> None:
    standard = random_scenario(7)
    for preset in PRESETS:
        if preset not in (SUMS, BUDGETS):  # whose runs have other rules
            assert replace(random_scenario(7, preset), faults=standard.faults) == standard


# ---------------------------------------------------------------- the network


def test_a_dropped_invitation_leaves_a_straggler() -> None:
    history = world_with(dropped=0.3)
    told = {(s.client_id, s.event.request.key[2]) for s in history.agent_steps if isinstance(s.event, Asked)}
    invited = {(e.client_id, e.round_id) for _, e in history.effects() if isinstance(e, Invite)}
    never_told = invited - told
    assert never_told
    fates = {history.records[round_id].clients[client_id].fate for client_id, round_id in never_told}
    assert fates <= {Fate.STRAGGLER, Fate.RELEASED, Fate.LOST}


def test_a_late_message_holds_up_heartbeats_until_the_lease_is_over() -> None:
    assert not lost(world_with())
    assert lost(world_with(delayed=0.5, delay=30.0, worker_crashes=0.5))[LossReason.LEASE_EXPIRED] > 0


def test_a_repeated_message_comes_twice() -> None:
    history = world_with(repeated=1.0)
    asked = Counter((s.client_id, s.event.request.key) for s in history.agent_steps if isinstance(s.event, Asked))
    assert max(asked.values()) == 2


@pytest.mark.slow
def test_overtaking_turns_the_order_of_two_messages_round() -> None:
    def orders(history: History) -> bool:
        rounds: dict[str, list[int]] = {}
        for step in history.agent_steps:
            if isinstance(step.event, Asked) and step.event.request.key[0] == "round":
                rounds.setdefault(step.client_id, []).append(step.event.request.key[2])
        return all(a <= b for told in rounds.values() for a, b in pairwise(told))

    slow: dict[str, Any] = {"delayed": 0.3, "delay": 60.0}
    assert all(orders(world_with(seed, rounds=20, **slow)) for seed in range(5))
    assert not all(orders(world_with(seed, rounds=20, overtakes=1.0, **slow)) for seed in range(5))


def test_a_message_may_break_its_stream() -> None:
    assert world_with(broken_by=0.3).faults["broken_by"] > 3


def test_a_partition_cuts_a_group_off_and_the_clients_come_back() -> None:
    history = world_with(rounds=30, partition_gap=60.0, partition=60.0)
    assert history.faults["partition_gap"] > 1
    assert lost(history)[LossReason.LEASE_EXPIRED] > 1
    at = max(step.when for step in history.steps if isinstance(step.event, ClientLost))
    assert any(isinstance(effect, Commit) for step, effect in history.effects() if step.when > at)


def test_the_bytes_of_a_transfer_over_a_slow_line_keep_its_client() -> None:
    policy = POLICY.model_copy(update={"deadline": 300.0})
    history = world_with(policy=policy, slow_line=1.0)
    assert history.faults["slow_line"] > 20
    assert not lost(history), "no heartbeat came through for up to six leases"
    assert all(record.phase is Phase.COMMITTED for record in history.records.values())


def test_a_goodbye_arrives() -> None:
    seen = lost(world_with(rounds=30, leave_gap=60.0))
    assert seen[LossReason.LEFT] > 5 * seen[LossReason.LEASE_EXPIRED], "who leaves before it was welcomed says nothing"


# ---------------------------------------------------------------- disks


def test_a_full_disk_neither_acknowledges_nor_loses_anything() -> None:
    history = world_with(rounds=30, full_disk_gap=40.0, full_disk=20.0)
    full = [
        (remark.at, float(remark.what.rpartition(" ")[2]))
        for remark in history.remarks
        if "disk is full" in remark.what
    ]
    assert len(full) > 3
    assert not [told for told in history.acknowledged for begin, end in full if begin < told.at < end]
    decided = [step for step in history.steps for begin, end in full if begin < step.when < end]
    assert decided, "the machine went on; what it decided was on disk later"
    assert all(record.phase is Phase.COMMITTED for record in history.records.values())


def test_a_slow_disk_delays_what_it_writes() -> None:
    quick, slow = world_with(), world_with(slow_writes=0.5, slow_write=10.0)
    assert slow.ended_at > quick.ended_at + 30


def test_a_damaged_snapshot_is_passed_over_for_the_one_before() -> None:
    faults: dict[str, Any] = {"crash_at_step": 0.05, "downtime": 1.0}
    history = world_with(rounds=30, damaged_snapshots=1.0, **faults)
    assert remarks(history, "newest snapshot is damaged")
    assert history.restarts
    assert all(not restart.forgotten for restart in history.restarts)


def test_an_agent_without_room_says_so() -> None:
    history = world_with(spool_full=0.3)
    failed = [s.event for s in history.agent_steps if isinstance(s.event, JobFailed)]
    assert {event.reason for event in failed} == {FailureReason.DISK_FULL}


def test_a_damaged_spool_is_trained_for_again() -> None:
    history = world_with(rounds=30, agent_crash_at_step=0.1, agent_downtime=1.0, spool_damaged=1.0)
    assert history.faults["spool_damaged"] > 1
    again = Counter((s.client_id, s.event.request.key) for s in history.agent_steps if isinstance(s.event, Asked))
    assert max(again.values()) > 1


# ---------------------------------------------------------------- clocks


def test_the_coordinators_clock_never_runs_backward_wherever_it_is_set() -> None:
    history = world_with(rounds=40, crash_at_step=0.02, clock_jumps=1.0, clock_jump=5000.0)
    back = [r for r in history.remarks if "wall clock is set by -" in r.what]
    forward = [r for r in history.remarks if "wall clock is set by +" in r.what]
    assert back
    assert forward
    assert all(a.at <= b.at for a, b in pairwise(history.steps))
    late = [s for s in history.steps if isinstance(s.event, CoordinatorStarted) and s.event.down_since > s.at]
    assert late, "it was set back behind the last instant that it had written down"


def test_a_clock_set_forward_extends_a_round_by_at_most_the_policys_bound() -> None:
    policy = POLICY.model_copy(update={"outage_max": 5.0})
    history = world_with(rounds=30, policy=policy, crash_at_step=0.02, clock_jumps=1.0, clock_jump=5000.0)
    outages = [outage for record in history.records.values() for outage in record.outages]
    assert max(outage.seconds for outage in outages) > 100
    assert all(0 <= outage.extended <= 5 for outage in outages)


def test_clocks_that_go_wrong_are_told_and_the_rounds_commit_once_they_are_right() -> None:
    history = world_with(rounds=60, clock_gap=300.0, clock_wrong=100.0)
    assert remarks(history, "notices that its clock was set by")
    assert remarks(history, "its clock stands still")
    assert remarks(history, "refuses Asked: clock_skew")
    assert all(record.phase is Phase.COMMITTED for record in history.records.values())


def test_a_start_with_a_wrong_clock_waits_for_the_operator() -> None:
    history = world_with(rounds=40, crash_at_step=0.02, clock_jumps=1.0, clock_jump=5000.0)
    assert remarks(history, "is not started: this machine's clock shows")
    assert history.restarts


def test_a_machine_that_sleeps_has_less_time_behind_it() -> None:
    history = world_with(rounds=30, suspend_gap=60.0, suspend=30.0)
    assert remarks(history, "sleeps for")
    behind = [step.when - step.at for step in history.agent_steps if step.client_id == "c00"]
    assert all(a <= b + 1e-9 for a, b in pairwise(behind))
    assert max(step.when - step.at for step in history.agent_steps) > 20


def test_every_preset_in_which_the_coordinators_disk_or_clock_matters_also_kills_it() -> None:
    assert all(set(COORDINATOR_DIES) <= PRESETS[preset] for preset in ("crashes", "disk", "clock", "standard"))


def test_the_same_seed_gives_the_same_faults() -> None:
    first = World(11, random_scenario(11)).run()
    second = World(11, random_scenario(11)).run()
    assert first.faults == second.faults
    assert first.remarks == second.remarks
