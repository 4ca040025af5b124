"""What a coordinator that lies learns with one or two colluding members: no sum of fewer than t - n_c others."""

import pytest

from atoll.client.secure.promises import Promises
from tests.server.sessions.lying_server import LyingServer, learned_span, smallest

SEEDS = [range(first, first + 50) for first in range(0, 300, 50)]


def margin(seed: int) -> int | None:
    """Return by how many updates the smallest combination that is learned is above the bound; None: none is learned."""
    server = LyingServer(seed)
    knowledge = server.run()
    fewest = smallest(learned_span(knowledge, server.honest), len(server.honest))
    return fewest - knowledge.least if fewest else None


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_every_combination_that_is_learned_has_at_least_t_less_colluders_honest_updates(seeds):
    found = [margin(seed) for seed in seeds]
    assert all(each is None or each >= 0 for each in found), [
        s for s, f in zip(seeds, found, strict=True) if f and f < 0
    ]
    learned = [each for each in found if each is not None]
    assert len(learned) > len(found) / 10, "some of the lies open a sum"
    assert 0 in learned, "the bound is attained"


def test_an_attempt_after_a_signature_would_open_single_updates(monkeypatch):
    """Two opened attempts that differ by one member are that member's update."""
    monkeypatch.setattr(Promises, "fault", lambda self, terms: "")
    assert min(each for seed in range(95, 110) if (each := margin(seed)) is not None) < 0


def test_two_quorums_without_a_common_honest_member_would_open_smaller_sums(monkeypatch):
    """Without the check of the threshold two of them agree to two sets of survivors, and open the difference."""
    monkeypatch.setattr(LyingServer, "believed", -100)
    monkeypatch.setattr(LyingServer, "threshold_rule", lambda self: "2")
    assert min(each for seed in range(40, 75) if (each := margin(seed)) is not None) < 0


@pytest.mark.parametrize(
    ("basis", "fewest"),
    [([], 0), ([[1, 1, 1]], 3), ([[1, 1, 1], [1, 1, 0]], 1), ([[1, 2, 0], [0, 0, 0]], 2), ([[1, 1, 0], [0, 1, 1]], 2)],
)
def test_the_smallest_combination_of_a_span(basis, fewest):
    assert smallest(basis, 3) == fewest
