"""What a coordinator logs of its clocks."""

import logging
from types import SimpleNamespace

import pytest

from atoll.protocol.vocabulary import ClientId
from atoll.server.clock import Reading
from atoll.server.hosting.clock_watch import ClockWatch

NOON = 1_700_000_000.0
"""2023-11-14 22:13:20 UTC."""


@pytest.fixture
def clocks(tmp_path, monkeypatch):
    """A watch, and the readings that it takes next."""
    it = SimpleNamespace(true=NOON, uptime=1000.0, jumps=[])
    monkeypatch.setattr(Reading, "take", staticmethod(lambda: Reading(it.true, it.uptime, "boot")))
    audit = SimpleNamespace(record=lambda *what: it.jumps.append(what))
    monotone = SimpleNamespace(now=lambda: NOON + it.uptime - 1000.0)
    it.watch = ClockWatch(SimpleNamespace(path=tmp_path), monotone, audit, lambda: it.true)
    return it


def said(it, caplog, *, true=0.0, uptime=0.0):
    """Let time pass by both clocks, look, and return the lines of the log."""
    caplog.clear()
    it.true, it.uptime = it.true + true, it.uptime + uptime
    it.watch.look()
    return caplog.messages


def test_a_jump_and_what_follows_from_it_are_one_line(clocks, caplog):
    caplog.set_level(logging.INFO, "atoll")
    for site in "abc":
        assert clocks.watch.refusal(ClientId(site), 0.5) == ""
    assert said(clocks, caplog, true=60.0, uptime=60.0) == []
    (line,) = said(clocks, caplog, true=660.0, uptime=60.0)
    assert line.startswith("this machine's clock was set forward by 10 min 0 s: from 2023-11-14 22:15:20 UTC to ")
    assert line.endswith(
        "; the clocks of 3 of 3 sites are about 10 min 0 s behind this machine's, which is probably wrong (NTP)"
    )
    assert [*clocks.watch.told] == ["journal", "machine"]
    assert said(clocks, caplog, true=60.0, uptime=60.0) == []
    back, agreed = said(clocks, caplog, true=-540.0, uptime=60.0)
    assert back.startswith("this machine's clock was set back by 10 min 0 s")
    assert agreed == "the journal's clock, this machine's clock and the sites' clocks agree again"
    assert len(clocks.jumps) == 2


def test_a_jump_is_told_before_the_sites_are_that_it_parts_from(clocks, caplog):
    caplog.set_level(logging.INFO, "atoll")
    clocks.watch.on_jump.append(lambda by: logging.getLogger("atoll").info("sites are dismissed"))
    assert said(clocks, caplog, true=3660.0, uptime=60.0)[1:] == ["sites are dismissed"]
