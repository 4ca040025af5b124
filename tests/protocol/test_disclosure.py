"""The terms on which a site's metrics leave it."""

import pytest

from atoll.protocol.disclosure import ANY_SUM, Disclosure, MetricsLeave


@pytest.mark.parametrize(
    ("metrics", "min_sites", "expected"),
    [
        ("per_site", 3, Disclosure(MetricsLeave.PER_SITE, 3)),
        ("", 0, ANY_SUM),  # an older agent
        ("everything", 0, ANY_SUM),  # a newer one: no more than it certainly allows
        ("merged", 2**32 - 1, Disclosure(MetricsLeave.MERGED, 1_000_000)),
    ],
)
def test_a_message_allows_no_more_than_it_says(metrics, min_sites, expected):
    assert Disclosure.read(metrics, min_sites) == expected


def test_terms_are_words_for_an_approval():
    assert str(Disclosure(MetricsLeave.PER_SITE, 1)) == "per_site"
    assert str(Disclosure(MetricsLeave.MERGED, 5)) == "merged, sums of at least 5 sites"
    assert str(Disclosure(MetricsLeave.NONE, 5)) == "none"
