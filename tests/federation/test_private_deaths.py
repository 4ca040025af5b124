"""A private run whose coordinator and agent are killed at each of their crash points: nothing is refunded."""

import pytest

from tests.federation.private_deaths import POINTS, killed, units_of

PLACES = {
    (unit, name): [(name, point) for point in points if unit in units_of(point)]
    for unit in ("client", "example")
    for name, points in POINTS.items()
}


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES, ids=" of ".join)
def test_charges_never_fall_and_precede_what_is_published_at_every_crash_point(tmp_path, place):
    deaths = killed(tmp_path, place[0], PLACES[place])
    assert deaths.deaths == {point: 1 for _, point in PLACES[place]}
