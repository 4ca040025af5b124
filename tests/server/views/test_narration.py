"""The round and the site of a line of a run's log, for programs."""

import json

import pytest

from atoll.protocol.vocabulary import FailureReason
from atoll.server.rounds.events import ClientFailed, ClientLost, Commit, Update, UpdateReceived
from atoll.server.views.narration import LogLine


@pytest.mark.parametrize(
    ("about", "fields"),
    [
        (ClientFailed("a", 3, FailureReason.DISK_FULL, ""), {"round": 3, "site": "a"}),
        (ClientLost("a", "left"), {"round": None, "site": "a"}),
        (Commit(4, 4, "d", ()), {"round": 4, "site": None}),
        (UpdateReceived(Update("b", 5, 4, "d", 10, 1.0)), {"round": 5, "site": "b"}),
        (None, {"round": None, "site": None}),
    ],
)
def test_a_line_has_the_round_and_the_client_of_what_it_is_about(about, fields):
    line = LogLine("the text", about)
    assert line.fields == fields
    assert line == "the text"
    assert json.dumps([line]) == '["the text"]'
