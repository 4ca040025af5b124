"""The opening of a sum: wrong shares open nothing and are named."""

import random

import pytest

from atoll.server.opening.streams import NotOpened, open_sum
from tests.server.sessions.small_federation import SmallFederation, sites_of, terms_of, vectors_of


class Captured(SmallFederation):
    """A session whose reveals are kept, of all its members."""

    def _open(self, reveals):
        self.reveals = reveals
        if len(reveals) < len(self.session.survivors) and self.queue:
            self.is_opening = False
            self._carry_out(self.session.refused())
            return
        super()._open(reveals)


@pytest.fixture(scope="module")
def opened():
    sites, draw = sites_of(6), random.Random(1)
    federation = Captured(sites, vectors_of(sites, draw), terms_of(), draw, {"site-05": 2})
    federation.run()
    assert len(federation.reveals) == 5
    return federation


def opening(federation, reveals):
    session = federation.session
    return open_sum(session.roster, session.id, session.masking, session.survivors, reveals)


def with_wrong(federation, *positions, count=5):
    reveals = dict([*federation.reveals.items()][:count])
    for position in positions:
        shares = [*reveals[position]]
        shares[position % len(shares)] += 1
        reveals[position] = tuple(shares)
    return reveals


@pytest.mark.parametrize("wrong", range(5))
def test_one_wrong_share_is_found_and_named(opened, wrong):
    sites, draw = sites_of(7), random.Random(2)
    federation = Captured(sites, vectors_of(sites, draw), terms_of(), draw)
    federation.run()
    right = opening(federation, federation.reveals)
    assert right.wrong == frozenset()
    reveals = dict([*federation.reveals.items()][:6])
    result = opening(federation, {**reveals, wrong: with_wrong(federation, wrong, count=6)[wrong]})
    assert result.wrong == {wrong}
    assert set(result.streams) == set(right.streams)


def test_a_wrong_share_among_no_more_than_the_threshold_opens_nothing(opened):
    assert opened.session.roster.threshold == 5
    opening(opened, opened.reveals)
    with pytest.raises(NotOpened, match="of 5 reveals no 5 are right"):
        opening(opened, with_wrong(opened, 2))


def test_two_wrong_shares_open_nothing(opened):
    sites, draw = sites_of(7), random.Random(3)
    federation = Captured(sites, vectors_of(sites, draw), terms_of(), draw)
    federation.run()
    with pytest.raises(NotOpened):
        opening(federation, with_wrong(federation, 0, 1, count=6))
