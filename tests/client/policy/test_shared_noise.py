"""The noise that a training leaves to its secure sum: a site trains for no sum without it."""

import json
from typing import Any

import pytest

from atoll.client.policy.decide import Kind, Outcome, Rule
from atoll.client.policy.shared_noise import fault_of_shares
from tests.client.policy.test_decide import answer, policy, wanted
from tests.server.sessions.small_federation import privacy_of, terms_of

LOCAL = {
    "max_steps": 1,
    "privacy.unit": "example",
    "privacy.noise_by": "clients",
    "privacy.sample_rate": 0.1,
    "privacy.noise_multiplier": 2.0,
    "privacy.clip_norm": 1.0,
    "privacy.epsilon": 1.0,
    "privacy.delta": 1e-5,
    "privacy.participations_max": 20,
    "privacy.batch": 40.0,
    "privacy.bits": 32,
}
INSIDE = {"unit": "example", "noise_multiplier": 0.05}


def local(**changed: Any) -> str:
    table = {**LOCAL, **{f"privacy.{name}": value for name, value in changed.items()}}
    return json.dumps({name: value for name, value in table.items() if value != "absent"})


def inside(**changed: Any):
    terms = {name: changed.pop(name) for name in ("bits", "clip_norm") if name in changed}
    return terms_of(privacy=privacy_of(**{**INSIDE, **changed}).text(), examples_max=0, **terms)


def test_a_sum_with_the_noise_of_the_step_is_right() -> None:
    assert fault_of_shares(local(), inside()) == ""
    assert fault_of_shares(local(), inside(noise_multiplier=0.06)) == "", "more noise is allowed"


@pytest.mark.parametrize(
    ("given", "secure", "fault"),
    [
        (local(), None, "a step without noise outside of a secure sum"),
        (local(), terms_of(), "a step without noise outside of a secure sum"),
        (
            local(),
            terms_of(privacy=privacy_of().text(), examples_max=0),
            "a step without noise outside of a secure sum",
        ),
        (
            local(),
            inside(noise_multiplier=0.0499),
            "a secure sum with noise multiplier 0.0499, and its step needs 0.05",
        ),
        (local(batch=39.0), inside(), "a secure sum with noise multiplier 0.05, and its step needs 0.0512821"),
        (local(noise_multiplier=2.1), inside(), "a secure sum with noise multiplier 0.05, and its step needs 0.0525"),
        (local(), inside(clip_norm=2.0), "a secure sum with clip norm and words of 2, 32 bits, and its step has 1, 32"),
        (local(), inside(bits=64), "a secure sum with clip norm and words of 1, 64 bits, and its step has 1, 32"),
        (local(batch="absent"), inside(), "a training without privacy.batch"),
        (local(batch=0), inside(), "a training with 0 as privacy.batch"),
        ("{}", inside(), "a secure sum with noise for examples of which the training knows nothing"),
        (local(noise_by="site"), inside(), "a secure sum with noise for examples of which the training knows nothing"),
        ("[", inside(), "a secure sum with noise for examples of which the training knows nothing"),
    ],
)
def test_a_site_trains_for_no_sum_that_lacks_the_noise(given: str, secure: Any, fault: str) -> None:
    """Also one without a budget, or without demands on secure sums: the step itself has no noise."""
    assert fault_of_shares(given, secure).startswith(fault)
    assert answer(policy(), wanted(local=given, terms=secure)) == (Outcome.REFUSED, Rule.SECURE)


def test_other_trainings_are_as_before() -> None:
    assert fault_of_shares("{}", None) == fault_of_shares("{}", terms_of()) == ""
    assert answer(policy(), wanted(Kind.EVALUATE, local=local()))[1] is not Rule.SECURE
