"""The lines of the log of a run of messages."""

from atoll.protocol.vocabulary import ClientId, FailureReason, RoundId
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.exchanges.rules import ExchangeRules
from atoll.server.rounds.events import ClientFailed
from atoll.server.views.message_lines import lines_of


def test_a_node_that_fails_has_one_line_with_the_conclusion_of_its_traceback() -> None:
    detail = 'Traceback (most recent call last):\n  File "app.py", line 3, in train\nValueError: no data today'
    failed = ClientFailed(ClientId("north"), RoundId(4), FailureReason.TRAINING_FAILED, detail)
    told = [*lines_of(ExchangeMachine(ExchangeRules()), failed, ())]
    assert len(told) == 1
    assert told[0].startswith("north gives no reply to message 4: training_failed: ValueError: no data today")
    assert "\n" not in told[0]
    assert "Traceback" not in told[0]
