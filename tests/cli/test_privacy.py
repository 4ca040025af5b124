"""`atoll privacy plan` and `atoll.privacy_plan`."""

import math

import pytest

import atoll
from atoll.protocol.privacy import loss_distribution
from atoll.server.folding.plan import Private
from tests.cli.invoking import invoke, ran, refused, shown


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
