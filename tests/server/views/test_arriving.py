"""Replies to messages that are on their way in, as a view of their exchange shows them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.server.names.presence import Arriving, Presence
from atoll.server.views import views


def test_an_exchange_shows_the_replies_that_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"number": 3, "fate": "waiting"}, {"number": 4, "fate": "reported"}]
    monkeypatch.setattr(views.message_views, "exchange", lambda *_: {"messages": messages, "sentences": ["It waits."]})
    coming = [
        Arriving("r-1", 3, "north", 10_000, 40_000),
        Arriving("r-1", 4, "south", 1, 2),
        Arriving("r-2", 3, "w", 1, 2),
    ]
    history = cast(Any, SimpleNamespace(presence=lambda: Presence((), tuple(coming))))
    found = views._exchange(history, cast(Any, SimpleNamespace(run_id="r-1")), 1)
    assert found["arriving"] == [{"client": "north", "num_bytes": 10_000, "total_bytes": 40_000}]
    assert found["sentences"] == ["It waits.", "north: 10.0 kB of 40.0 kB of its reply have arrived (25%)."]
