"""The rule against rollback in whole histories: it refuses only requests that arrive twice or too late."""

import itertools

import pytest

from atoll.client.session import events as client
from atoll.client.session.rollback_rules import Refused, Seen, judge
from atoll.protocol.vocabulary import FailureReason
from atoll.simulations.histories import network
from atoll.simulations.histories.scenario import random_scenario
from atoll.simulations.histories.world import World


def judged(seed, preset, monkeypatch):
    """Judge every request that reached an agent, as if it was signed when sent; yield the reasons of refusals."""
    numbers, issued, kept = itertools.count(1), {}, []
    send = network.Connection.to_agent

    def signed(self, event):
        issued[id(event)] = next(numbers)
        kept.append(event)  # so that no other gets its id
        send(self, event)

    monkeypatch.setattr(network.Connection, "to_agent", signed)
    history = World(seed, random_scenario(seed, preset)).run()
    seen = {}
    for step in history.agent_steps:
        if isinstance(step.event, client.Asked):
            number, before = issued[id(step.event)], seen.get(step.client_id, Seen())
            after = judge(step.event, number, before, number / 1e6)
            if isinstance(after, Refused):
                assert number <= before.issued_us, (seed, step, before)
                assert after.reason is FailureReason.REPLAYED
                yield after.reason
            else:
                seen[step.client_id] = after
                yield None


@pytest.mark.parametrize("preset", ["network", "standard", "clock"])
def test_only_what_is_shown_twice_or_too_late_is_refused(preset, monkeypatch):
    refused = []
    for seed in range(8):
        with monkeypatch.context() as patch:
            refused += judged(seed, preset, patch)
    assert len(refused) > 50
    assert any(refused) or preset == "clock"
