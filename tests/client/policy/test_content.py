"""The identity of a training: the fields that make two trainings of one round the same work."""

from dataclasses import fields, replace
from typing import Any

import pytest

from atoll.client.policy.gate import content_of
from atoll.client.session.events import Invitation
from atoll.protocol.vocabulary import Digest, RoundId, RunId, Version
from tests.server.sessions.small_federation import DIGEST, terms_of

INVITATION = Invitation(RunId("r-1"), RoundId(1), "t", Version(0), Digest("0" * 64), 30.0)

OTHER_WORK: dict[str, Any] = {
    "task": "u",
    "base_version": 1,
    "model_digest": "1" * 64,
    "seed": 1,
    "local": '{"lr": 1}',
    "algorithm": "scaffold",
    "codec": "bf16",
    "counted_round": 1,
    "model_seed": 1,
    "message": "train",
    "secure": terms_of(),
}
SAME_WORK: dict[str, Any] = {
    "run_id": "r-2",
    "round_id": 2,
    "time_left": 5.0,
    "rank": 1,
    "spreads": True,
    "manifest": b"m",
    "data": b"d",
    "group": "1",  # of a message only
    "run_number": 2,  # as the run
    "asked_at": 9.0,
    "ranges": (1,),  # their digest is in the terms
}


@pytest.mark.parametrize("name", OTHER_WORK)
def test_whoever_changes_a_word_of_it_asks_for_another_training(name: str) -> None:
    assert content_of(replace(INVITATION, **{name: OTHER_WORK[name]})) != content_of(INVITATION)


@pytest.mark.parametrize("name", SAME_WORK)
def test_what_the_update_does_not_depend_on_changes_nothing(name: str) -> None:
    assert content_of(replace(INVITATION, **{name: SAME_WORK[name]})) == content_of(INVITATION)


@pytest.mark.parametrize(
    ("changes", "is_same"), [({"attempt": 2}, True), ({"ranges": DIGEST[::-1]}, False), ({"bits": 64}, False)]
)
def test_another_attempt_at_a_secure_sum_is_the_same_work(changes: dict[str, Any], is_same: bool) -> None:
    first, second = (replace(INVITATION, secure=terms) for terms in (terms_of(), terms_of(**changes)))
    assert (content_of(first) == content_of(second)) is is_same


def test_no_field_of_an_invitation_is_forgotten() -> None:
    assert {field.name for field in fields(Invitation) if field.init} == {*OTHER_WORK, *SAME_WORK}
