"""Schedules of a secure sum: members end at any message, in any order: the exact sum, or a clean end."""

import itertools
import random

import numpy as np
import pytest

from atoll.server.sessions.session import Fail
from tests.server.sessions.small_federation import SmallFederation, attempts, sites_of, terms_of, vectors_of

MESSAGES = 4  # that a member gets in a session: roster, boxes, survivors, opening


def check(federation):
    """Check that an opened sum is exact, over at least a threshold of members."""
    outcome = federation.outcome
    if isinstance(outcome, Fail) or outcome is None:
        return False
    total, survivors = outcome
    assert len(survivors) >= federation.session.roster.threshold
    expected = np.zeros_like(total)
    for name in survivors:
        expected += federation.vectors[name]
    assert np.array_equal(total, expected)
    return True


@pytest.mark.parametrize("seed", range(40))
def test_a_schedule_opens_the_exact_sum_or_ends(seed):
    draw = random.Random(seed)
    sites = sites_of(draw.randint(3, 12))
    vectors = vectors_of(sites, draw, draw.choice([np.uint32, np.uint64]))

    def ends(attempt):
        return {site.name: draw.randint(0, MESSAGES) for site in sites if draw.random() < 0.2}

    federation = attempts(sites, vectors, draw, ends=ends)
    check(federation)


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_every_set_of_survivors_of_small_sessions_opens_or_ends(count):
    """Each subset of members ends before masking, or after it: what is left is at least the threshold, or no sum is."""
    for ended, at in itertools.product(range(2**count), (0, 1, 2, 3)):
        draw = random.Random(ended)
        sites = sites_of(count)
        ends = {site.name: at for number, site in enumerate(sites) if ended >> number & 1}
        federation = SmallFederation(sites, vectors_of(sites, draw), terms_of(), draw, ends)
        federation.run()
        is_opened = check(federation)
        assert is_opened == (count - len(ends) >= federation.session.roster.threshold)


def test_members_that_stay_open_the_sum_of_all():
    sites = sites_of(5)
    draw = random.Random(1)
    federation = SmallFederation(sites, vectors_of(sites, draw), terms_of(), draw)
    _total, survivors = federation.run()
    assert check(federation)
    assert survivors == [site.name for site in sites]
    assert federation.reasons == {}
    assert not np.array_equal(federation.masked["site-00"], federation.vectors["site-00"])


def test_another_attempt_adds_the_same_updates_under_other_masks():
    sites = sites_of(4)
    draw = random.Random(2)
    vectors = vectors_of(sites, draw)
    first = SmallFederation(sites, vectors, terms_of(), draw, {"site-01": 1, "site-02": 1})
    failed = first.run()
    assert failed == Fail("masking: 2 of 4 members have sent masked updates; needed: 3", may_repeat=True)
    second = SmallFederation(sites, vectors, terms_of(attempt=2), draw)
    second.run()
    assert check(second)
    common = first.masked.keys() & second.masked.keys()
    assert common
    assert all(not np.array_equal(first.masked[name], second.masked[name]) for name in common)


@pytest.mark.parametrize(("ends", "stage"), [(2, "agreeing"), (3, "opening")])
def test_no_attempt_follows_signed_survivors(ends, stage):
    sites = sites_of(4)
    draw = random.Random(3)
    vectors = vectors_of(sites, draw)
    first = SmallFederation(sites, vectors, terms_of(), draw, {"site-01": ends, "site-02": ends})
    failed = first.run()
    assert isinstance(failed, Fail)
    assert failed.reason.startswith(stage)
    assert not failed.may_repeat
    second = SmallFederation(sites, vectors, terms_of(attempt=2), draw)
    second.run()
    signed = {first.names[position] for position in first.session.survivors} - {"site-01", "site-02"}
    assert {second.reasons[name] for name in signed} == {
        "this site has signed the survivors of round 1: no other attempt of it is joined"
    }
