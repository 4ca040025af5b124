"""The messages of the control stream as an agent reads them: fields that an older coordinator does not send."""

import math

import pytest

from atoll.client.wire.messages import BadMessage, event_of
from atoll.protocol import atoll_pb2 as pb

INVITE = {"run_id": "r-1", "round_id": 1, "task": "t", "model_digest": "0" * 64, "time_left_s": 30.0}
EVALUATE = {"run_id": "r-1", "version": 1, "task": "t", "model_digest": "0" * 64, "time_left_s": 30.0}


def asked(kind, **fields):
    message = pb.Invite(**INVITE, **fields) if kind == "invite" else pb.Evaluate(**EVALUATE, **fields)
    return event_of(pb.ServerMessage(**{kind: message})).request


@pytest.mark.parametrize("kind", ["invite", "evaluate"])
def test_the_number_of_the_run_and_the_instant_may_be_absent_but_not_nonsense(kind):
    told = asked(kind, run_number=2**63 - 1, asked_at=1.7e9)
    assert (told.run_number, told.asked_at) == (2**63 - 1, 1.7e9)
    older = asked(kind)
    assert (older.run_number, older.asked_at) == (0, 0.0)
    for nonsense in (math.nan, math.inf, -1.0):
        with pytest.raises(BadMessage, match="asked_at: got "):
            asked(kind, asked_at=nonsense)
