"""The time at which trainings are computed: not before an outcome is requested, and no more than are wanted."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.client.session.events import Invitation
from atoll.protocol.vocabulary import Digest, RoundId, RunId, Version
from atoll.simulations.engines.engine import Trained
from atoll.simulations.federation.trainings import Effort, Trainings


@dataclass
class Engine:
    """An engine that records the clients it trains, one cohort at a time, as engines may demand."""

    name: str = "noted"
    begun: list[list[str]] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    is_busy: bool = False

    def train(self, version, jobs):
        assert not self.is_busy
        self.is_busy = True
        self.begun.append([job.client_id for job in jobs])
        for job in jobs:
            self.computed.append(job.client_id)
            work = 1.0 if job.steps is None else job.steps / 10
            yield Trained(job.client_id, {}, 1, work, {}, {}, {})
        self.is_busy = False

    def close(self):
        pass


def invitation(version="v0"):
    return Invitation(RunId("run-1"), RoundId(1), "task", Version(0), Digest(version), 60.0, seed=1)


def trainings_of(engine, wanted=100):
    return Trainings(engine, lambda digest: {}, lambda client, asked: None, lambda: wanted)


def test_the_first_outcome_is_there_before_the_others_are_computed():
    engine = Engine()
    trainings = trainings_of(engine)
    abc = [trainings.begin(name, invitation(), Effort(10, 10, 1.0), 0.0, 60.0) for name in ("c", "a", "b")]
    assert engine.begun == []
    assert trainings.outcome(abc[0]).client_id == "c"
    assert engine.begun == [["c", "a", "b"]]
    assert engine.computed == ["c"]
    assert [trainings.outcome(each).client_id for each in abc[1:]] == ["a", "b"]
    assert trainings.num_computed == 3
    assert len(engine.begun) == 1


def test_trainings_that_end_next_are_computed_together_and_no_more_than_are_wanted():
    engine = Engine()
    trainings = trainings_of(engine, wanted=3)
    slow, first, last, second = (
        trainings.begin(name, invitation(), Effort(10, 10, seconds), 0.0, 60.0)
        for name, seconds in (("slow", 9.0), ("first", 1.0), ("last", 30.0), ("second", 2.0))
    )
    assert trainings.outcome(first).client_id == "first"
    assert engine.begun == [["first", "second", "slow"]]
    assert trainings.outcome(last).client_id == "last"
    assert engine.begun[1:] == [["last"]]
    assert trainings.outcome(slow).client_id == "slow"
    assert trainings.outcome(second).client_id == "second"
    assert trainings.num_computed == 4


def test_another_version_waits_until_the_engine_is_done():
    engine = Engine()
    trainings = trainings_of(engine)
    old = [trainings.begin(name, invitation("v0"), Effort(10, 10, 1.0), 0.0, 60.0) for name in "ab"]
    new = trainings.begin("c", invitation("v1"), Effort(10, 10, 5.0), 0.0, 60.0)
    trainings.outcome(old[0])
    trainings.forget(old[1])
    assert trainings.outcome(new).client_id == "c"
    assert engine.begun == [["a", "b"], ["c"]]


def test_one_that_was_planned_anew_meanwhile_is_computed_again():
    engine = Engine()
    trainings = trainings_of(engine)
    a, b = (
        trainings.begin(name, invitation(), Effort(10, 10, seconds), 0.0, 60.0)
        for name, seconds in (("a", 1.0), ("b", 2.0))
    )
    trainings.outcome(a)
    b.plan(1.0)  # half of its time
    assert trainings.outcome(b).work == pytest.approx(0.5)
    assert engine.begun == [["a", "b"], ["b"]]


@given(
    st.lists(st.tuples(st.sampled_from("xy"), st.floats(0.1, 9.0)), min_size=1, max_size=12),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_each_training_gets_its_own_outcome_in_any_order_of_requests(efforts, wanted, rng):
    engine = Engine()
    trainings = trainings_of(engine, wanted)
    begun = [
        trainings.begin(f"client-{number}", invitation(version), Effort(10, 10, seconds), 0.0, 60.0)
        for number, (version, seconds) in enumerate(efforts)
    ]
    rng.shuffle(begun)
    for training in begun:
        assert trainings.outcome(training).client_id == training.client_id
    assert sorted(engine.computed) == sorted(training.client_id for training in begun)
