"""Attacks of a simulated run's coordinator, from the table `[attack]`: what it infers, and to whom it lies."""

import json
from pathlib import Path

import pytest

from atoll.protocol.secure.messages import Boxes, Gone, Opening, Survivors
from atoll.protocol.secure.wire import SessionName
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import ClientId, RoundId, RunId
from atoll.server.rounds.session_events import TellMember
from atoll.simulations.attacks.lying_coordinator import ANSWERED, MOVES, LyingCoordinator
from tests.server.sessions.test_lies import Honest
from tests.simulations.federation.simulating import simulate
from tests.simulations.secure import layered_task

SECURE = ("secure.clip_norm=0.5", "secure.examples_max=8", "simulation.secure=real")
RUN = RunId("run-1")


def attacked(folder, kind, *overrides, **options):
    result, found = simulate(folder, f"attack.kind={kind}", "rounds=2", "round.cohort_size=4", *overrides, **options)
    return result, [line.get("attack") for line in found]


def test_an_inversion_of_plain_updates_shows_an_input_and_of_masked_ones_none(tmp_path):
    one = ("population.kind=iid", "population.clients=44", "round.cohort_size=12")  # one step on one example
    plain, lines = attacked(tmp_path / "plain", "inversion", *one)
    masked, _ = attacked(tmp_path / "masked", "inversion", *one, *SECURE)
    assert lines[0].keys() == {"clients", "distance", "mean_image"}
    assert [line["clients"] for line in lines] == [12, 12]
    assert plain["attack"]["clients"] == 24
    assert plain["attack"]["distance"] == pytest.approx(sum(line["distance"] for line in lines) / 2)
    assert masked["attack"]["mean_image"] == plain["attack"]["mean_image"]
    assert plain["attack"]["distance"] < 1e-6
    assert plain["attack"]["mean_image"] > 0.5
    assert masked["attack"]["distance"] > 0.1, "the best of 8 random guesses in 3 dimensions"
    assert "malicious" not in plain


def test_membership_is_told_by_plain_updates_and_not_by_masked_ones(tmp_path):
    plain, _ = attacked(tmp_path / "plain", "membership", "local.lr=0.01")
    masked, found = attacked(tmp_path / "masked", "membership", "local.lr=0.01", *SECURE)
    assert plain["attack"].keys() == {"clients", "area"}
    assert plain["attack"]["area"] > 0.5
    assert abs(masked["attack"]["area"] - 0.5) < 0.25  # four standard deviations of 8 areas of about 11 and 11
    assert [line["clients"] for line in found] == [4, 4]


@pytest.mark.slow
def test_a_lying_coordinator_is_refused_at_every_lie_and_opens_honest_sums_alone(tmp_path):
    lying = ("rounds=10", "population.clients=8", "population.kind=iid", "round.cohort_size=8", "round.quorum=4")
    lying = (*lying, "round.failure_rest=0", "seed=3")
    result, found = attacked(tmp_path / "lied to", "lying_coordinator", *lying, *SECURE)
    lies = [lie for line in found for lie in line["lies"]]
    assert len(lies) >= 10
    assert len({lie["move"] for lie in lies}) >= 6
    assert all(lie["refused"] for lie in lies), lies
    assert result["attack"]["told"] == result["attack"]["refused"] == len(lies)
    assert sum(each["told"] for each in result["attack"]["moves"].values()) == len(lies)
    rounds = [json.loads(line) for line in (tmp_path / "lied to" / "rounds.jsonl").read_text().splitlines()]
    assert {each["stage"] for line in rounds for each in line["sums"]} <= {"opened", "failed"}
    assert result["version"] == sum(line["version"] is not None for line in rounds) > 0
    assert not any(each.get("dropped") for line in rounds for each in line["sums"]), "no sum was noise"


@pytest.mark.parametrize("move", MOVES)
def test_each_lie_is_refused_by_a_member_that_checks_and_noted(move, monkeypatch):
    for seed in range(6):
        honest = Honest()
        liar = LyingCoordinator(seed)
        with monkeypatch.context() as patched:
            patched.setattr("random.Random.choice", lambda self, names: move)
            asked = _told(liar, honest.roster)
        victim = next(iter(liar._lies.values())).place.victim
        sealed = [honest.ask(asked[n], n) for n in range(5)]
        noted = _heard(liar, victim, sealed[victim])
        if not isinstance(sealed[victim], Gone):
            boxes = [Boxes({of: sealed[of].boxes[n] for of in range(5) if of != n}) for n in range(5)]
            noted = [_ask(liar, honest, n, boxes[n]) for n in range(5)][victim]
        if noted is None and not _outcome(liar):
            signed = [_ask(liar, honest, n, Survivors(frozenset(range(5))), keep=True) for n in range(5)]
            if not _outcome(liar):
                signatures = {n: each.signature for n, each in enumerate(signed)}
                _ask(liar, honest, victim, Opening(signatures))
        found = liar.take(RoundId(1))
        assert (found["told"], found["refused"]) == (1, 1), found
        assert found["lies"][0]["move"] == move
        assert honest.members[victim]._secrets is None


def _told(liar, question):
    """Return what each member is told in place of a question."""
    effects = [TellMember(ClientId(f"site-{number:02d}"), RoundId(1), 0, 1, 5, question) for number in range(5)]
    return [liar.told(effect).question for effect in effects]


def _outcome(liar):
    return next(iter(liar._lies.values())).outcome


def _heard(liar, number, message):
    return liar.heard(ClientId(f"site-{number:02d}"), SessionName(RUN, RoundId(1), 1, 0), message)


def _ask(liar, honest, number, question, *, keep=False):
    """Ask a member what the liar makes of a question, and what follows on its answer; return the answer."""
    effect = TellMember(ClientId(f"site-{number:02d}"), RoundId(1), 0, 1, 5, question)
    answer = honest.ask(liar.told(effect).question, number)
    another = _heard(liar, number, answer) if answer is not None else None
    if another is not None:
        _heard(liar, number, honest.ask(another.question, number))
    return answer if keep else (answer if isinstance(answer, Gone) else None)


def test_a_lie_that_is_answered_is_no_refusal_and_a_restart_neither():
    liar = LyingCoordinator(0)
    honest = Honest()
    effect = TellMember(ClientId("site-00"), RoundId(1), 0, 1, 5, honest.roster)
    liar.told(effect)
    lie = next(iter(liar._lies.values()))
    for outcome, refused in ((ANSWERED, False), ("session_lost", False), ("", False), ("threshold 3", True)):
        lie.outcome = outcome
        assert lie.is_refused is refused
    assert (
        liar.told(TellMember(ClientId("site-00"), RoundId(1), 0, 1, 5, honest.roster, "evaluation")).purpose
        == "evaluation"
    )


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (
            ("attack.kind=inversion", *SECURE, "simulation.secure=fast"),
            'with simulation.secure = "fast" nothing is masked',
        ),
        (("attack.kind=lying_coordinator", *SECURE, "simulation.secure=fast"), 'allowed: simulation.secure = "real"'),
        (("attack.kind=lying_coordinator",), "and the run has none; allowed: a run with [secure]"),
        (("attack.kind=membership", "attack.malicious=2"), "malicious is not an option of membership"),
        (
            ("attack.kind=lying_coordinator", "attack.keeps_bound=true"),
            "keeps_bound is not an option of lying_coordinator",
        ),
        (("attack.kind=inversion", "attack.factor=2"), "factor is not an option of inversion"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, overrides, fault):
    given = [
        each for number, each in enumerate(overrides) if each.split("=")[0] not in " ".join(overrides[number + 1 :])
    ]
    with pytest.raises(ConfigError) as error:
        simulate(tmp_path, "rounds=1", "round.cohort_size=4", *given)
    assert fault in str(error.value)
    assert not (tmp_path / "rounds.jsonl").exists()


def test_a_model_without_a_linear_first_layer_cannot_be_inverted(tmp_path):
    task = f"{Path(layered_task.__file__)}:adapted"
    with pytest.raises(ConfigError, match=r"attack.kind: got 'inversion'"):
        simulate(tmp_path, "attack.kind=inversion", "rounds=1", "round.cohort_size=4", task=task)
