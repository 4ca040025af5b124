"""The crash matrix must be able to fail: what it looks for is planted here, and found."""

import re
from pathlib import Path
from typing import get_args

import pytest

import atoll
from atoll.ground.process.crash_points import STEPS, parse_crash_at
from atoll.parallel.mesh_client.crash_points import OF_SUMS, PlannedEnd
from atoll.parallel.mesh_client.crash_points import STEPS as RANK_STEPS
from atoll.protocol.vocabulary import ClientId, Digest, Fate, Phase, RoundId, RunState, Version
from atoll.server.rounds import events
from atoll.server.rounds.record import CarriedRecord, ClientRecord, RoundRecord
from atoll.server.rounds.session_events import SessionEffect, SessionEvent
from benchmarks import secure_deaths
from benchmarks.crash_matrix import ELSEWHERE, IN_A_MESH, QUICK, QUICK_SECURE, Tally, bars_of, schedule
from benchmarks.evidence import Ledger, accepted_in_logs, judge
from benchmarks.federation import RANK, Recovery
from tests.federation import private_deaths, test_private_sums
from tests.federation.statistics import test_secure_deaths


def record(round_id, *, used=True, digest="d"):
    """A committed round with one client."""
    client = ClientRecord(0.0, Fate.REPORTED, digest=Digest(f"{digest}{round_id}"))
    client.used_in = RoundId(round_id) if used else None
    return RoundRecord(
        RoundId(round_id),
        Version(round_id - 1),
        0.0,
        cohort_size=1,
        quorum=1,
        num_needed_to_draw=1,
        phase=Phase.COMMITTED,
        clients={ClientId("a"): client},
    )


def ledger(*records, state=RunState.FINISHED):
    return Ledger(state, "because", tuple(records), {0: "zero", 1: "one"})


def test_a_run_in_which_all_is_well_has_no_faults():
    end = ledger(record(1), record(2))
    verdict = judge(end, [((1, "a"), "d1")], {(1, "a"), (2, "a")})
    assert verdict.text == "well"


def test_an_accepted_update_in_no_model_is_lost():
    assert judge(ledger(record(1, used=False)), [], set()).lost == ["d1 of a in round 1"]


def test_an_update_that_was_promised_before_a_crash_and_has_gone_is_lost():
    assert judge(ledger(record(1)), [((1, "a"), "another")], set()).lost == ["another of a in round 1"]


def test_an_update_that_only_its_agent_knows_to_be_accepted_is_lost():
    assert judge(ledger(record(1)), [], {(1, "b")}).lost == ["round 1 of b, accepted by its log"]


def test_an_update_whose_record_says_why_it_is_in_no_model_is_not_lost():
    one = record(1, used=False)
    one.clients[ClientId("a")].unused_because = "the run was stopped"
    assert judge(ledger(one), [], set()).lost == []


def test_an_update_that_two_commits_hold_is_counted_twice():
    late = CarriedRecord(ClientId("a"), RoundId(1), 1, Digest("d1"), 1, 1.0)
    second = record(2)
    second.carried.append(late)
    assert judge(ledger(record(1), second), [], set()).twice == ["d1 (2 times)"]


def test_a_run_that_failed_or_abandoned_a_round_is_a_fault():
    open_round = record(1)
    open_round.phase = Phase.ABANDONED
    verdict = judge(ledger(open_round, state=RunState.FAILED), [], set())
    assert len(verdict.faults) == 2


def test_what_agents_were_told_is_read_from_their_logs(tmp_path):
    log = tmp_path / "a.log"
    log.write_text(
        "12:00:00 the update of round 3 of crash-1 is accepted\n12:00:01 the update of round 4 of crash-1 is refu"
    )
    assert accepted_in_logs([("a", log), ("b", tmp_path / "none")]) == {(3, "a")}


def test_every_named_step_is_on_the_schedule():
    """But for those that a plain run does not reach: a row of such a step could only say so."""
    assert {entry.partition(":")[0] for entry in schedule()} == {
        name for name, _ in (*STEPS, *RANK_STEPS) if not name.startswith(ELSEWHERE) and name not in OF_SUMS
    }
    ends = [entry.removesuffix(IN_A_MESH) for entry in schedule() if entry.startswith("crew.")]
    assert {PlannedEnd.parse(end).rank for end in ends} == {0, 1}
    assert set(QUICK) <= set(schedule())


def test_every_step_in_the_source_has_a_name_and_every_name_a_step():
    """`reached` is not called in tests alone, and no name outlives the line that it is for."""
    source = Path(atoll.__file__).parents[1]
    rooms = (folder for folder in source.iterdir() if (folder / "__init__.py").exists())
    files = [path for room in rooms if room.name not in ("tests", "benchmarks") for path in room.rglob("*.py")]
    called = {name for path in files for name in re.findall(r'\breached\("([^"]+)"', path.read_text("utf-8"))}
    assert called == {name for name, _ in (*STEPS, *RANK_STEPS)}


OUTSIDE_THE_MATRIX = {
    step.partition(":")[0]
    for step in (
        *(step for deaths in test_secure_deaths.STEPS.values() for step in deaths.values()),
        *test_private_sums.STEPS,
        *(step for steps in private_deaths.POINTS.values() for step in steps if step not in secure_deaths.NOT_IN_SUMS),
    )
}
"""The steps of secure sums of statistics, of private ones, and of fresh noise: judged in those tests."""


def test_every_crash_point_of_secure_sums_has_a_death():
    """In a row of `crash_matrix --secure`, or in the tests of statistics or of private sums: all by a real kill."""
    steps = secure_deaths.steps_of(secure_deaths.rows())
    names = {step.partition("/")[0] for step in (*steps, *OUTSIDE_THE_MATRIX)}
    assert names | secure_deaths.NOT_IN_SUMS.keys() == {name for name, _ in (*STEPS, *RANK_STEPS)}
    assert not names & secure_deaths.NOT_IN_SUMS.keys()


def test_every_event_and_effect_of_secure_sums_has_a_death():
    """A new one in `session_events.py` needs a row; these few are of the rounds themselves."""
    steps = secure_deaths.steps_of(secure_deaths.rows()) | OUTSIDE_THE_MATRIX
    of_rounds = (events.UpdateReceived, events.Aggregated, events.AggregationFailed, events.DiskShort, events.DiskFree)
    wanted = {f"round.entry/{kind.__name__}" for kind in (*get_args(SessionEvent), *of_rounds)}
    asked = (events.AskEvaluation, events.CloseEvaluation, events.AuditCharge, events.Invite, events.Aggregate)
    wanted |= {f"round.effect/{kind.__name__}" for kind in (*get_args(SessionEffect), *asked)}
    wanted |= {"agent.promised/joined", "agent.promised/signed"}
    assert wanted <= steps, wanted - steps


def test_every_death_of_a_row_can_be_planned_and_names_what_there_is():
    kinds = {f"round.entry/{kind.__name__}" for kind in get_args(events.Event)}
    kinds |= {f"round.effect/{kind.__name__}" for kind in get_args(events.Effect)}
    kinds |= {"agent.promised/joined", "agent.promised/signed"}
    rows = secure_deaths.rows()
    assert len(rows) == len({*rows})
    assert {*QUICK_SECURE} <= {*rows}
    for row in rows:
        for step in secure_deaths.read(row)[0]:
            if step.startswith("crew."):
                PlannedEnd.parse(step)
            else:
                assert parse_crash_at({"ATOLL_CRASH_AT": step})
            assert "/" not in step or step.partition(":")[0] in kinds, step
    of_ranks = [PlannedEnd.parse(row.partition(" + ")[0]) for row in rows if row.startswith("crew.")]
    assert {(end.step, end.rank) for end in of_ranks} >= {(step, rank) for step in OF_SUMS for rank in (0, 1)}
    with pytest.raises(ValueError, match=r"there is no run fulll disk; allowed: mesh, "):
        secure_deaths.read("agent.masked:1 + fulll disk")


def test_a_rank_that_heals_slowly_misses_a_bar():
    deaths = [Recovery(RANK, "crew.mid_step", seconds) for seconds in (1.0, 6.0, 7.0)]
    tally = Tally({}, num_runs=1, num_same=1, recoveries=[*deaths, Recovery(RANK, "crew.trained")])
    assert [bar.ok for bar in bars_of(tally)] == [True, True, True, True, True, False]


def test_a_step_that_was_not_reached_misses_a_bar():
    tally = Tally({}, num_runs=1, num_same=1, not_reached=["publish.after:9"])
    assert [bar.ok for bar in bars_of(tally)] == [True, True, True, True, False]
