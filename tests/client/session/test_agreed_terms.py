"""The terms of a sum are those of its invitation, field by field: no site adds the update of something else."""

from dataclasses import replace

import pytest

from atoll.client.session.agreed_terms import fault_of_terms
from atoll.client.session.events import EvaluationRequest
from atoll.protocol.secure.terms import ranges_digest
from atoll.protocol.vocabulary import Digest, RunId, Version
from tests.client.session.test_session import invitation
from tests.server.sessions.small_federation import terms_of

INVITED = invitation(3, local='{"lr": 0.1}', algorithm="fedprox", ranges=(0, -2))
TERMS = terms_of(
    **{"run": "run", "round": 3, "base": 0, "model": "v0", "task": "task", "algorithm": "fedprox"},
    **{"local": '{"lr": 0.1}', "ranges": ranges_digest((0, -2))},
)
OTHERS = {
    **{"run": "other", "round": 4, "purpose": "evaluation", "base": 1, "model": "cd" * 32, "task": "other"},
    **{"algorithm": "fedavg", "local": '{"lr": 0.2}', "ranges": ranges_digest((0, -3))},
}


def test_the_terms_of_an_invitation_are_agreed_to():
    assert fault_of_terms(INVITED, TERMS) == ""


@pytest.mark.parametrize("name", OTHERS)
def test_other_terms_are_refused_with_both_values(name):
    fault = fault_of_terms(INVITED, replace(TERMS, **{name: OTHERS[name]}))
    here = "update" if name == "purpose" else getattr(TERMS, name)
    assert fault == f"terms.{name} is {OTHERS[name]!r}; the invitation says {here!r}"


EVALUATED = EvaluationRequest(RunId("run"), Version(3), "task", Digest("v0"), 60.0, local='{"lr": 0.1}')
OF_EVALUATION = replace(
    TERMS, purpose="evaluation", base=3, algorithm="", ranges=ranges_digest(()), bits=64, receivers=()
)


def test_the_terms_of_an_evaluation_are_agreed_to():
    assert fault_of_terms(EVALUATED, OF_EVALUATION) == ""


@pytest.mark.parametrize("name", [*OTHERS, "bits", "receivers"])
def test_other_terms_of_an_evaluation_are_refused_with_both_values(name):
    others = {**OTHERS, "purpose": "update", "base": 2, "bits": 32, "receivers": (0,)}
    fault = fault_of_terms(EVALUATED, replace(OF_EVALUATION, **{name: others[name]}))
    assert fault == f"terms.{name} is {others[name]!r}; the request says {getattr(OF_EVALUATION, name)!r}"


def test_a_codec_is_refused():  # 38
    assert fault_of_terms(replace(INVITED, codec="int8"), TERMS) == "the codec 'int8' in a secure sum; allowed: none"


def test_a_long_value_is_cut():
    assert len(fault_of_terms(INVITED, replace(TERMS, local="x" * 10_000))) < 300
