"""The certificate that a port shows: the newest, but never while an older one may be about to be used."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.identity.names import COORDINATOR
from atoll.server.identity.authority import Authority
from atoll.server.transport.server_credentials import SETTLE_S, Shown
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[3]


@dataclass
class Kept:
    """The keeper that the port reads; any two credentials differ."""

    current: object


@dataclass
class Clock:
    """A clock that advances when a test or a sleep advances it."""

    now: float = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(scope="module")
def credentials(tmp_path_factory):
    authority = Authority.create(tmp_path_factory.mktemp("ca"), "test")
    return [authority.credential(COORDINATOR) for _ in range(2)]


@given(steps=st.lists(st.tuples(st.booleans(), st.floats(0.0, 2 * SETTLE_S)), max_size=20))
def test_a_newer_one_is_given_once_and_never_soon_after_another_answer(credentials, steps):
    """Take steps: each replaces the certificate or not, then waits for the seconds until the next handshake."""
    clock, which = Clock(), 0
    kept = Kept(credentials[0])
    shown = Shown(kept, asks_for_certificates=True, clock=lambda: clock.now, sleep=clock.sleep)
    answered_at = clock.now
    for is_replaced, wait in steps:
        if is_replaced:
            which = 1 - which
            kept.current = credentials[which]
        clock.now += wait
        asked_at = clock.now
        answer = shown()
        assert (answer is not None) is is_replaced
        if is_replaced:
            assert clock.now == pytest.approx(max(asked_at, answered_at + SETTLE_S))
        else:
            assert clock.now == asked_at
        answered_at = clock.now


@pytest.mark.slow
def test_many_handshakes_during_a_renewal_do_not_end_the_process():
    """Dial as strangers and as members: before the fix one of the two ports ended the process within seconds."""
    command = [sys.executable, "-m", "tests.server.identity.handshakes", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 0, done.stderr[-3000:]
    num_strangers, num_members, num_certificates = map(int, done.stdout.split())
    assert num_strangers > 50
    assert num_members > 50
    assert num_certificates > 3
