"""The terms of a sum are those of its invitation, field by field: no site adds the update of something else."""

from dataclasses import replace

import pytest

from atoll.client.session.agreed_terms import fault_of_terms
from atoll.protocol.secure.terms import ranges_digest
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


def test_a_codec_is_refused():  # 38
    assert fault_of_terms(replace(INVITED, codec="int8"), TERMS) == "the codec 'int8' in a secure sum; allowed: none"


def test_a_long_value_is_cut():
    assert len(fault_of_terms(INVITED, replace(TERMS, local="x" * 10_000))) < 300
