import json

from atoll.protocol.vocabulary import RunId
from atoll.server.config.run import RunConfig
from atoll.server.hosting.messages import (
    INLINE_MANIFEST_BYTES_MAX,
    ClientTerms,
    OfferedModel,
    RunTerms,
    invitation,
)
from atoll.server.rounds.events import Invite


def message(manifest=b"m", deadline=110.0, now=100.0):
    config = RunConfig(
        name="r",
        task="m:t",
        rounds=1,
        seed=11,
        local={"lr": 0.1},
        aggregation={"algorithm": "scaffold", "num_clients": 5},
        round={"cohort_size": 2, "grace": 1.0},
    )
    terms = RunTerms.of(RunId("r-1"), "t", config)
    model, client = OfferedModel("d", manifest), ClientTerms(seed=5, codec="")
    return invitation(Invite("a", 3, 2, deadline, 1), terms, model, client, now=now).invite


def test_deadline_travels_as_time_left_because_clocks_differ():
    assert message().time_left_s == 10.0
    assert message(now=111.0).time_left_s == 0.0


def test_small_manifest_rides_in_the_invitation_and_a_large_one_does_not():
    assert message(b"x" * INLINE_MANIFEST_BYTES_MAX).manifest
    assert not message(b"x" * (INLINE_MANIFEST_BYTES_MAX + 1)).manifest


def test_overrides_travel_as_plain_json():
    assert json.loads(message().local) == {"lr": 0.1}


def test_what_the_algorithm_needs_travels():
    invite = message()
    assert (invite.algorithm, invite.counted_round, invite.model_seed) == ("scaffold", 1, 11)
    assert (invite.run_id, invite.task, invite.model_digest, invite.grace_s) == ("r-1", "t", "d", 1.0)
