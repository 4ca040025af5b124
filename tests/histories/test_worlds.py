"""Hundreds of worlds, each from one seed: under all faults they keep architecture, invariants 1 to 5 and 8.

`make soak` judges twenty thousand.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from typing import Any

import pytest

from atoll.client.secure.member import Effect, Mask, Member, Stream
from atoll.protocol.secure.messages import Boxes
from atoll.protocol.secure.terms import Terms
from atoll.protocol.vocabulary import (
    AbandonReason,
    CloseReason,
    FailureReason,
    Fate,
    Phase,
    RejectReason,
    ReleaseReason,
    RunState,
)
from atoll.server.config.kinds import COHORT_SAMPLERS
from atoll.server.rounds.cohort_round import Round
from atoll.server.rounds.events import Aggregate, DrawCohort, EndRun, PauseRun, Reject, Release
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules
from atoll.server.rounds.session_events import KeysCame
from tests.histories import sums
from tests.histories.checks import check, faults_of
from tests.histories.faults import Faults
from tests.histories.history import History
from tests.histories.judge import BadHistory, judged
from tests.histories.scenario import SUMS, Scenario, calm, random_scenario
from tests.histories.test_faults import NOT_COUNTED
from tests.histories.world import World

SEEDS = 480
SUMS_SEEDS = 60
"""Worlds with secure sums; `make soak` judges ten thousand."""
BATCHES = [range(first, first + 60) for first in range(0, SEEDS, 60)]
RARE = (523, 739, 1089)
"""Worlds in which a run is stopped while its buffer has a quorum, or that use an update of two versions before."""

NOT_THE_MACHINES = {
    RejectReason.BAD_MANIFEST,
    RejectReason.WRONG_LAYOUT,
    RejectReason.WRONG_CODEC,
    RejectReason.DIGEST_MISMATCH,
    RejectReason.BAD_ENCODING,
    RejectReason.NOT_FINITE,
}  # the service says these before the machine sees an update


def what_happened(history: History) -> Counter[object]:
    """Count each reason, fate and end of a history."""
    seen: Counter[object] = Counter()
    for record in history.records.values():
        seen[record.close_reason] += 1
        seen[record.abandon_reason] += 1
        seen.update(row.fate for row in record.clients.values())
        seen.update("carried" for _ in record.carried)
        seen.update("stale" for carried in record.carried if carried.staleness > 1)
        seen.update("superseded" for _ in record.superseded)
        seen.update(what_a_buffer_held(record))
    for _, effect in history.effects():
        if isinstance(effect, Reject | Release):
            seen[effect.reason] += 1
        if isinstance(effect, Aggregate):
            seen["opened"] += len(effect.sums)
        if isinstance(effect, EndRun):
            seen[effect.state] += 1
            seen["early stop"] += effect.cause.startswith("early stop")
        if isinstance(effect, PauseRun):
            seen["unmeasured"] += "could not measure" in effect.cause
    seen[Fate.JOINED] += sum(isinstance(step.event, KeysCame) for step in history.steps)
    seen.update("restart" for _ in history.restarts)
    seen.update("killed" for end in history.worker_ends if end.was_killed)
    seen[history.scenario.cohort.sampler] += 1
    seen.update("relaxed" for _, effect in history.effects() if isinstance(effect, DrawCohort) and effect.relaxed)
    seen.update(row.reason for r in history.records.values() for row in r.clients.values() if row.fate is Fate.FAILED)
    seen.update(history.faults)
    return seen


def what_a_buffer_held(record: RoundRecord) -> Iterator[str]:
    """Yield the special contents of an asynchronous run's buffer: stale updates, and one client twice."""
    if record.mode != "sync" and record.phase is Phase.COMMITTED:
        yield record.mode
        yield from ("in a buffer, stale" for row in record.buffer if row.staleness > 1)
        if len({row.client_id for row in record.buffer}) < len(record.buffer):
            yield "twice in a buffer"


@cache
def seen_in(seed: int, preset: str) -> Counter[object]:
    """Judge a history, and count what happened in it."""
    return what_happened(judged(seed, preset=preset))


def seen_in_all(seeds: Iterable[int], preset: str = "standard") -> Counter[object]:
    seen: Counter[object] = Counter()
    for seed in seeds:
        seen.update(seen_in(seed, preset))
    return seen


@pytest.mark.parametrize("seeds", [*BATCHES, RARE], ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_every_history_keeps_the_invariants(seeds: Iterable[int]) -> None:
    seen_in_all(seeds)


@pytest.mark.parametrize("first", range(0, SUMS_SEEDS, 20))
def test_every_history_with_secure_sums_has_exact_sums_or_clean_ends(first: int) -> None:
    seen = seen_in_all(range(first, first + 20), SUMS)
    assert seen["opened"]
    assert seen["restart"]


def test_a_wrong_sum_and_a_pad_that_is_used_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "add_stream", lambda *_: None)
    with pytest.raises(BadHistory, match=r"the sum of session 0 in round \d+ is wrong") as caught:
        seen_in_all_anew(range(20))
    assert "replay: python -m tests.histories --faults sums --seed " in str(caught.value)
    assert len(str(caught.value)) < 50_000, "keys and shares are short in it"
    monkeypatch.undo()
    monkeypatch.setattr(Member, "__init__", same_secrets(Member.__init__))
    with pytest.raises(BadHistory, match="uses one pad twice"):
        seen_in_all_anew(range(60))


def seen_in_all_anew(seeds: Iterable[int]) -> None:
    for seed in seeds:
        judged(seed, preset=SUMS)


def same_secrets(made: Any) -> Any:
    """Return a constructor of members of which all attempts of a site at a round's sum have the same pads."""

    def init(self: Member, name: str, terms: Terms, *rest: Any, **named: Any) -> None:
        made(self, name, terms, *rest, **named)
        answered = self._on_boxes

        def on_boxes(boxes: Boxes) -> list[Effect]:
            effects = answered(boxes)
            return [Mask((Stream(bytes(32), 1), *effects[0].streams))]  # type: ignore[union-attr]

        self._on_boxes = on_boxes  # type: ignore[method-assign]

    return init


@pytest.mark.slow
def test_the_worlds_exercise_every_reason_fate_and_end() -> None:
    seen = seen_in_all([*range(SEEDS), *RARE]) + seen_in_all(range(SUMS_SEEDS), SUMS)
    wanted: set[object] = {*CloseReason, *AbandonReason, *(set(RejectReason) - NOT_THE_MACHINES)}
    wanted -= {AbandonReason.RESTORED}  # no world has a backup
    wanted |= set(Fate) - {Fate.WAITING}
    wanted |= {RunState.FINISHED, RunState.STOPPED, RunState.FAILED}
    wanted |= {"carried", "stale", "superseded", "restart", "killed"}
    wanted |= {"fedbuff", "fedasync", "in a buffer, stale", "twice in a buffer", *ReleaseReason}
    wanted |= {*COHORT_SAMPLERS.variants, "relaxed", "early stop", "unmeasured"}
    assert {what for what in wanted if not seen[what]} == set()


def test_the_worlds_draw_every_field_of_the_policy() -> None:
    values: dict[str, set[object]] = {}
    for seed in range(300):
        for field, value in random_scenario(seed).rules.policy.model_dump().items():
            values.setdefault(field, set()).add(value)
    assert [field for field, drawn in values.items() if len(drawn) < 2] == ["max_examples", "max_units", "max_share"]
    assert None in values["linger"]
    assert "adaptive" in values["deadline"]


@pytest.mark.parametrize("seed", [3, 105, 239])
def test_the_same_seed_gives_the_same_history(seed: int) -> None:
    first, second = judged(seed), judged(seed)
    assert repr(first.steps) == repr(second.steps)  # a claimed NaN is not equal to itself
    assert repr(first.agent_steps) == repr(second.agent_steps)
    assert first.records == second.records
    assert first.transcript() == second.transcript()


def test_different_seeds_give_different_histories() -> None:
    assert judged(1).steps != judged(2).steps


def test_a_calm_world_commits_every_round_with_everyone() -> None:
    rules = RunRules(policy=StragglerPolicy(cohort_size=5, deadline=600.0), rounds=3)
    history = World(0, calm(rules, 5)).run()
    check(history)
    assert [record.close_reason for record in history.records.values()] == [CloseReason.ENOUGH] * 3
    assert all(row.used_in == number for number, r in history.records.items() for row in r.clients.values())


def test_a_calm_asynchronous_world_counts_every_update_once() -> None:
    policy = StragglerPolicy(mode="fedbuff", buffer_size=3, concurrency=6, deadline=600.0)
    history = World(0, calm(RunRules(policy=policy, rounds=12), 8)).run()
    check(history)
    held = [(row, record) for record in history.records.values() for row in record.buffer]
    assert len(held) == 12 * 3
    assert len({(row.client_id, record.base_version - row.staleness) for row, record in held}) == len(held)
    assert {row.staleness for row, _ in held} > {0, 1}, "somebody was slow"


def test_a_bad_history_names_its_seed_and_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Round, "_settle", lambda self, now: ())  # a round waits for its deadline whatever happens
    rules = RunRules(policy=StragglerPolicy(cohort_size=2, deadline=600.0), rounds=1)
    with pytest.raises(BadHistory) as caught:
        judged(0, calm(rules, 2))
    text = str(caught.value)
    assert text.startswith("seed=0: ")
    assert "replay: python -m tests.histories --faults standard --seed 0" in text
    assert "coordinator  " in text


@pytest.mark.slow
def test_ten_thousand_clients_commit_a_round_in_seconds() -> None:
    policy = StragglerPolicy(cohort_size=8000, over_selection=1.25, quorum=0.5, deadline=60.0, grace=20.0)
    faults = Faults(cut_gap=200.0, worker_crashes=0.05)
    world = World(1, Scenario(rules=RunRules(policy=policy, rounds=1), num_clients=10_000, faults=faults))
    history = world.run()
    machine, begun = RunMachine(history.scenario.rules), time.process_time()
    for step in history.steps:
        assert machine.receive(step.event, step.at) == step.effects
    assert time.process_time() - begun < 10  # half a second on an idle core
    record = history.records[next(iter(history.records))]
    assert len(record.clients) == 10_000
    assert record.num_reported >= policy.quorum_count
    assert record.version == 1


def test_faults_of_a_history_that_was_tampered_with_are_found() -> None:
    """The checks find each of these falsifications of a good history."""
    history = next(h for h in map(judged, range(50)) if h.acknowledged and len(h.records) > 1)
    assert list(faults_of(history)) == []
    round_id = max(history.records)
    record = history.records.pop(round_id)
    assert any("no record of it is on disk" in fault for fault in faults_of(history))
    history.records[round_id] = record
    history.left_in_spool.append((history.acknowledged[0].client_id, ("round", "run", 1)))  # type: ignore[arg-type]
    assert any("neither answered nor discarded" in fault for fault in faults_of(history))
    history.left_in_spool.clear()
    dropped = history.steps.pop()
    assert list(faults_of(history))
    history.steps.append(dropped)
    assert list(faults_of(history)) == []


@pytest.mark.slow
def test_agents_give_up_for_more_than_one_reason() -> None:
    seen = seen_in_all(range(100))
    assert {FailureReason.DOWNLOAD_FAILED, FailureReason.WORKER_CRASHED, FailureReason.OUT_OF_TIME} <= set(seen)


@pytest.mark.slow
def test_the_standard_worlds_have_every_fault() -> None:
    assert {field.name for field in fields(Faults)} - NOT_COUNTED - set(seen_in_all(range(200))) == set()
