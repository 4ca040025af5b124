"""`atoll privacy plan` and `atoll.privacy_plan`."""

import math

import pytest

import atoll
from atoll.protocol.privacy import loss_distribution
from atoll.server.folding.plan import Private
from tests.cli.invoking import invoke, ran, refused, shown
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK


def plan(*arguments: object) -> dict[str, object]:
    found: dict[str, object] = shown("privacy", "plan", *arguments, "--json")
    return found


def test_the_noise_for_an_epsilon() -> None:
    found = plan("--epsilon", 1, "--delta", 1e-5, "--uses", 1)
    assert found["noise_multiplier"] == pytest.approx(3.730632, abs=1e-5)
    assert found["fits"] == found["left"] == 1
    said = ran("privacy", "plan", "--epsilon", 1, "--delta", 1e-5, "--uses", 1).stdout
    assert "epsilon 1 at delta 1e-05 for one client: adjacent are" in said
    assert "epsilon 1 at delta 1e-05 allows 1 use\n" in said


def test_the_epsilon_of_a_noise_and_of_fewer_uses() -> None:
    found = plan("--noise-multiplier", 8, "--delta", 1e-5, "--rounds", 100)
    assert found["epsilon"] == pytest.approx(5.679587, abs=1e-5)
    assert found["fits"] is None
    rows = found["by_uses"]
    assert isinstance(rows, list)
    assert [row["uses"] for row in rows] == [1, 2, 5, 10, 20, 50, 100]
    assert rows[-1]["epsilon"] == found["epsilon"]


def test_the_uses_that_are_left() -> None:
    arguments = ("--noise-multiplier", 1.2, "--epsilon", 8, "--delta", 1e-6)
    assert (plan(*arguments)["fits"], plan(*arguments, "--spent", 2)["left"]) == (3, 1)
    assert plan(*arguments, "--spent", 5)["left"] == 0
    assert "allows 3 uses, of which 1 are left" in ran("privacy", "plan", *arguments, "--spent", 2).stdout


def test_what_the_noise_does_to_the_mean() -> None:
    size = ("--cohort-size", 10, "--values", 3_400_000)
    found = plan("--noise-multiplier", 1, "--delta", 1e-6, "--rounds", 4, *size)["noise_of_mean"]
    assert found == {
        "one_round": pytest.approx(math.sqrt(3_400_000) / 10),
        "all_rounds": pytest.approx(2 * math.sqrt(3_400_000) / 10),
        "rounds": 4,
    }
    said = ran("privacy", "plan", "--noise-multiplier", 1, "--delta", 1e-6, "--rounds", 4, *size).stdout
    assert "over the length of a clipped update: 184\n" in said
    assert "more than training can give: more clients" in said


OF_400 = ("--epsilon", 8, "--delta", 1e-6, "--uses", 10, "--cohort-size", 400, "--quorum", 300)


def test_the_rounds_that_fit_and_what_dropouts_do_to_the_mean() -> None:
    found = plan(*OF_400, "--clients", 4000, "--spent", 4, "--rounds", 200, "--values", 650)
    rounds, z = found["round"], found["noise_multiplier"]
    assert isinstance(rounds, dict)
    assert isinstance(z, float)
    assert (rounds["dropouts"], rounds["uses"], rounds["whole"], rounds["in_quorums"]) == (100, 6, 60, 80)
    noise = z * math.sqrt(650) / 400
    assert [each["updates"] for each in rounds["by_survivors"]] == [400, 367, 333, 300]
    assert [each["noise"] for each in rounds["by_survivors"]] == [pytest.approx(noise)] * 4
    assert rounds["by_survivors"][-1]["length"] == 0.75
    # the grid of z = 2.06 has steps of 2^(1 - 30), and rounding makes an update longer by sqrt(650) / 2 of them
    assert rounds["norm_max"] == pytest.approx(1 - math.sqrt(650) * 2.0**-30, abs=1e-11)
    said = ran("privacy", "plan", *OF_400, "--clients", 4000, "--rounds", 200).stdout
    assert "a round needs 300 of 400 updates: 100 clients may drop out" in said
    assert "4000 clients with 10 uses each: at most 100 rounds of whole cohorts, or 133 of a quorum each" in said
    assert "200 rounds of a quorum each need at least 6000 clients" in said
    enough = plan(*OF_400, "--clients", 6000, "--rounds", 200)["round"]
    assert isinstance(enough, dict)
    assert enough["in_quorums"] == 200
    assert enough["by_survivors"] == []


OF_12 = ("--epsilon", 8, "--delta", 1e-6, "--rounds", 10, "--cohort-size", 12, "--noise-by", "clients")


def test_noise_by_the_clients_has_the_shares_of_the_honest_ones() -> None:
    found = plan(*OF_12, "--quorum", 10, "--values", 650)
    rounds, z = found["round"], found["noise_multiplier"]
    assert isinstance(rounds, dict)
    assert isinstance(z, float)
    # two thirds of 12, and one more, open a sum; one of them may be a colluder
    assert (rounds["threshold"], rounds["honest_min"], rounds["colluders"]) == (9, 8, 1)
    by = {each["updates"]: each["noise"] for each in rounds["by_survivors"]}
    assert by == {m: pytest.approx(z * math.sqrt(650 * m / 8) / 12) for m in (12, 11, 10)}
    noise = found["noise_of_mean"]
    assert isinstance(noise, dict)
    assert noise["one_round"] == pytest.approx(by[12])
    assert "the clients add the noise inside their secure sums" in str(found["sentence"])
    assert "a sum has at least 9 members, and the noise of any 8 of them suffices" in str(found["sentence"])
    assert rounds["norm_max"] == pytest.approx(1 - math.sqrt(650) / 2 / (2**21 - 1), abs=1e-11)
    fewer = plan(*OF_12, "--quorum", 6, "--honest-min", 5, "--values", 650)["noise_of_mean"]
    assert isinstance(fewer, dict)
    assert fewer["one_round"] == pytest.approx(z * math.sqrt(650 * 12 / 5) / 12)


SIMULATED = {"rounds": 3, "cohort_size": 4, "clip_norm": 0.5, "delta": 1e-6, "epsilon": 300.0}


@pytest.mark.slow
def test_a_preview_is_the_simulation_of_the_task_with_the_plan_and_without_privacy() -> None:
    engine = {"simulation.engine": "sequential", "population.kind": "natural"}
    found = atoll.privacy_plan(**SIMULATED, simulate=line_task.task, set=engine)
    assert found.preview is not None
    assert found.preview["metric"] == "server/accuracy"
    plain = {**engine, "aggregation.weighting": "uniform", "round.cohort_size": 4}
    private = {"epsilon": 300.0, "delta": 1e-6, "clip_norm": 0.5, "noise_multiplier": found.noise_multiplier}
    private = plain | {f"privacy.{name}": value for name, value in private.items()} | {"privacy.participations_max": 3}
    for name, settings in (("plain", plain), ("private", private)):
        run = atoll.simulate(line_task.task, rounds=3, set=settings, progress=False)
        assert found.preview[name] == tuple(run.rounds.column("server.accuracy")), name
    assert found.preview["private"] != found.preview["plain"]
    assert found.preview["epsilon"] == pytest.approx(300.0)
    assert found.preview["sentence"].startswith("no guarantee, as the noise of a simulation follows from its seed")


@pytest.mark.slow
def test_a_preview_of_correlated_noise_has_a_cohort_for_each_version_of_its_separation() -> None:
    engine = {"simulation.engine": "sequential"}
    sizes = {"rounds": 3, "cohort_size": 2, "clip_norm": 0.5, "delta": 1e-6, "epsilon": 300.0}
    found = atoll.privacy_plan(**sizes, mechanism="correlated", separation=2, simulate=line_task.task, set=engine)
    assert found.preview is not None
    private = {name: sizes[name] for name in ("epsilon", "delta", "clip_norm")} | {"mechanism": "correlated"}
    private |= {"separation_min": 2, "noise_multiplier": found.noise_multiplier}
    settings = {**engine, "aggregation.weighting": "uniform", "round.cohort_size": 2}
    settings |= {f"privacy.{name}": value for name, value in private.items()}
    run = atoll.simulate(line_task.task, rounds=3, clients=4, set=settings, progress=False)
    assert found.preview["private"] == tuple(run.rounds.column("server.accuracy"))
    assert found.preview["epsilon"] == pytest.approx(300.0)


@pytest.mark.slow
def test_a_preview_with_fewer_clients_has_the_noise_of_the_plan() -> None:
    arguments = ("--delta", 1e-6, "--epsilon", 8, "--rounds", 2, "--cohort-size", 100, "--simulate", TASK)
    given = ("--set", "round.cohort_size=4", "--set", "population.kind='natural'")
    found = shown("privacy", "plan", *arguments, *given, "--json")["preview"]
    assert "its sums of 4 clients have the noise of a cohort of 100" in found["sentence"]
    said = ran("privacy", "plan", *arguments, *given).stdout
    assert "simulated: no guarantee" in said
    assert "without privacy  2 " in said


def test_the_faults_of_a_preview_come_before_anything_runs() -> None:
    arguments = ("--delta", 1e-6, "--epsilon", 8, "--rounds", 2, "--cohort-size", 5, "--simulate", TASK)
    given = ("--set", "population.kind='natural'", "--set", "aggregation.rule='median'")
    faults = refused("privacy", "plan", *arguments, *given)
    assert any("aggregation.rule" in fault for fault in faults)
    with pytest.raises(atoll.AtollError, match=r"set: got .*; allowed with simulate alone"):
        atoll.privacy_plan(delta=1e-6, epsilon=1.0, uses=1, set={"rounds": 2})


def test_correlated_noise_adds_up_to_less() -> None:
    size = ("--rounds", 100, "--delta", 1e-5, "--epsilon", 2, "--cohort-size", 400, "--values", 650)
    plain = plan(*size, "--uses", 10)["noise_of_mean"]
    found = plan(*size, "--mechanism", "correlated", "--separation", 10)
    correlated = found["noise_of_mean"]
    assert found["bands"] == 6
    assert isinstance(plain, dict)
    assert isinstance(correlated, dict)
    assert correlated["all_rounds"] < 0.5 * plain["all_rounds"]


def test_examples_have_the_tight_account_or_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--unit", "example", "--noise-multiplier", 4, "--delta", 1e-5, "--sample-rate", 0.01)
    found = plan(*arguments, "--steps", 10_000)
    assert found["epsilon"] == pytest.approx(0.946999, abs=1e-3)
    assert "dp-accounting" in str(found["accountant"])
    monkeypatch.setattr(loss_distribution, "is_installed", lambda: False)
    found = plan(*arguments, "--steps", 10_000)
    assert found["epsilon"] == pytest.approx(1.03549, abs=1e-3)
    assert "upper bound" in str(found["accountant"])
    needed = plan(*arguments[:2], "--epsilon", 1.0355, *arguments[4:], "--steps", 10_000)
    assert needed["noise_multiplier"] == pytest.approx(4.0, abs=1e-3)
    assert needed["fits"] == 10_000


BAD = {
    "everything": (
        ("--delta", 0, "--epsilon", "nan", "--clip-norm", -1, "--uses", 0, "--unit", "site"),
        ["--unit", "--delta", "--epsilon", "--clip-norm", "--uses"],
    ),
    "nothing": ((), ["--delta", "--epsilon, --noise-multiplier", "--uses, --rounds"]),
    "infinite": (("--delta", 1e-5, "--noise-multiplier", "inf"), ["--noise-multiplier"]),
    "delta for few": (
        ("--delta", 0.05, "--noise-multiplier", 1, "--cohort-size", 20, "--values", 9),
        ["--delta: got 0.05; 1 / 20 or more"],
    ),
    "half of a mean": (("--delta", 1e-5, "--noise-multiplier", 1, "--values", 9), ["--cohort-size, --values"]),
    "the other unit": (
        ("--delta", 1e-5, "--noise-multiplier", 1, "--steps", 9, "--sample-rate", 0.1),
        ["--sample-rate", "--steps"],
    ),
    "clients' among examples": (
        ("--delta", 1e-5, "--noise-multiplier", 1, "--unit", "example", "--uses", 9, "--mechanism", "correlated"),
        ["--uses", "--mechanism", "--sample-rate", "--steps"],
    ),
    "uncorrelated": (("--delta", 1e-5, "--noise-multiplier", 1, "--separation", 2), ["--separation"]),
    "correlated": (
        ("--delta", 1e-5, "--noise-multiplier", 1, "--mechanism", "correlated", "--spent", 2),
        ["--rounds, --separation", "--spent"],
    ),
    "a round without a cohort": (
        ("--delta", 1e-6, "--epsilon", 1, "--uses", 1, "--clients", 9, "--quorum", 3, "--noise-by", "clients"),
        ["--clients: got 9", "--quorum: got 3", "--cohort-size: missing"],
    ),
    "a cohort larger than all": (
        ("--delta", 1e-6, "--epsilon", 1, "--uses", 1, "--cohort-size", 9, "--quorum", 10, "--clients", 8),
        ["--clients: got 8", "--quorum: got 10"],
    ),
    "shares of one who adds none": (
        ("--delta", 1e-6, "--epsilon", 1, "--uses", 1, "--honest-min", 5, "--colluders", 0, "--bits", 64),
        ["--honest-min", "--colluders", "--bits"],
    ),
    "more colluders than a session has": (
        (*OF_12, "--colluders", 65),
        ["--colluders: got 65; allowed: a whole number, 0"],
    ),
    "too many colluders": ((*OF_12, "--colluders", 6), ["--colluders: got 6, and with [privacy] 9 of the 12"]),
    "a quorum without the noise, and no room for it": (
        (*OF_12[2:], "--epsilon", 0.01, "--quorum", 5),
        ["--quorum: got 5, and with [privacy] a sum has at least 9", "--noise-multiplier: 12 members in words of 32"],
    ),
    "too few for a sum": ((*OF_12[:6], "--cohort-size", 2, "--noise-by", "clients"), ["--cohort-size: got 2"]),
    "too many values": (
        (*OF_12, "--values", 2**44),
        ["--values: updates of"],
    ),
    "of no known kind": (
        ("--delta", 1e-6, "--epsilon", 1, "--uses", 1, "--noise-by", "me", "--bits", 16),
        ["--noise-by: got 'me'; allowed: coordinator, clients", "--bits: got 16; allowed: 32, 64"],
    ),
    "more correlated rounds than a run may have": (
        ("--delta", 1e-5, "--epsilon", 1, "--mechanism", "correlated", "--separation", 2, "--rounds", 2001),
        ["--rounds: got 2001; allowed with correlated noise: 1 to 2000"],
    ),
    "correlated rounds": (
        (*OF_12, "--mechanism", "correlated", "--separation", 2, "--clients", 99),
        ["--clients", "--noise-by"],
    ),
    "more uses than rounds": (("--delta", 1e-5, "--epsilon", 1, "--uses", 9, "--rounds", 5), ["--uses"]),
}


@pytest.mark.parametrize("case", BAD)
def test_all_faults_are_told_at_once(case: str) -> None:
    arguments, begins = BAD[case]
    faults = refused("privacy", "plan", *arguments)
    assert len(faults) == len(begins), faults
    assert all(fault.startswith(begin) for fault, begin in zip(faults, begins, strict=True)), faults


def test_the_same_from_python() -> None:
    found = atoll.privacy_plan(delta=1e-5, epsilon=1.0, uses=1, cohort_size=100, values=100)
    assert found.noise_multiplier == pytest.approx(3.730632, abs=1e-5)
    assert (found.fits, found.epsilon) == (1, pytest.approx(1.0))
    assert found.noise_of_mean is not None
    assert found.sentence == repr(found)
    with pytest.raises(atoll.AtollError, match=r"delta: got True; .*\nuses: got 2.5; allowed: a whole number"):
        atoll.privacy_plan(delta=True, epsilon=1.0, uses=2.5)
    with pytest.raises(atoll.AtollError, match="privacy_plan: got clip; allowed: delta, epsilon"):
        atoll.privacy_plan(delta=1e-5, epsilon=1.0, clip=2)


AUDITED = ("privacy", "audit", "tests/operations/audited.py:task", "--set", "privacy.epsilon=2", "--canaries", "100")
FOR_CLIENTS = ("privacy.delta=1e-5", "privacy.clip_norm=1", "aggregation.weighting=uniform", "rounds=1")
SETTINGS = [part for setting in FOR_CLIENTS for part in ("--set", setting)]


def test_an_audit_has_a_table_or_a_document() -> None:
    found = shown(*AUDITED, *SETTINGS, "--json")
    assert (found["unit"], found["canaries"], found["holds"]) == ("client", 100, True)
    assert found["claim"] == pytest.approx(2.0, abs=1e-6)
    assert 0.0 <= found["lower_bound"] <= found["lower_bound_max"]
    said = ran(*AUDITED, *SETTINGS).stdout
    assert "claim        epsilon 2.0000 at delta 1e-05 for one client: one use of a client" in said
    assert "30 % too little noise is never found" in said


def test_a_refuted_claim_has_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Private, "clip_factors", lambda self, norms, *_: [1.0] * len(norms))
    result = invoke(*AUDITED[:-1], "400", *SETTINGS)
    assert result.exit_code == 1
    assert "The claim does not hold" in result.stdout
