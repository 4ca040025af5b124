"""The rules of partition: every example once, with the distributions of the formulas and papers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.simulations.populations import partitions
from atoll.simulations.populations.partitions import Impossible, stream
from tests.later import later

stats = later("scipy.stats")

MANY = np.repeat(np.arange(10), 6000)
"""Labels of about the number of MNIST's."""


def counts_of(labels: np.ndarray, owner: np.ndarray, num_clients: int) -> np.ndarray:
    """(K, L) by a plain loop."""
    counts = np.zeros((num_clients, labels.max() + 1), int)
    for label, client in zip(labels, owner, strict=True):
        counts[client, label] += 1
    return counts


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_shares_are_rounded_up_or_down_and_nothing_is_lost(data: st.DataObject) -> None:
    num_labels, num_clients = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 30))
    sizes = np.array(data.draw(st.lists(st.integers(0, 200), min_size=num_labels, max_size=num_labels)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shares = rng.dirichlet(np.full(num_clients, 0.3), num_labels)
    counts = partitions.apportion(sizes, shares, rng)
    assert (counts.sum(axis=1) == sizes).all()
    assert (np.abs(counts - shares * sizes[:, None]) < 1 + 1e-6).all()


def test_the_rounding_of_shares_has_no_bias() -> None:
    shares = np.array([[0.05, 0.15, 0.3, 0.5]])
    rng = stream(1, "rounding")
    mean = np.mean([partitions.apportion(np.array([3]), shares, rng) for _ in range(4000)], axis=0)
    np.testing.assert_allclose(mean, 3 * shares, atol=0.03)


@given(st.integers(1, 400), st.integers(1, 40), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_dealing_gives_each_client_what_was_counted(num_examples: int, num_clients: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, num_examples)
    sizes = np.bincount(labels, minlength=4)
    counts = partitions.apportion(sizes, rng.dirichlet(np.ones(num_clients), 4), rng)
    owner = partitions.deal(labels, counts, rng)
    found = np.zeros_like(counts)
    np.add.at(found, (labels, owner), 1)
    assert (found == counts).all()


def test_a_dirichlet_share_has_the_distribution_of_the_formula() -> None:
    """One client's share of one label is Beta(α, (K - 1) α)."""
    rng = stream(3, "marginal")
    shares = np.concatenate(
        [partitions.dirichlet(np.full(10, 20_000), 8, 0.5, 1, rng)[:, 0] / 20_000 for _ in range(60)]
    )
    assert stats.kstest(shares, stats.beta(0.5, 3.5).cdf).pvalue > 0.01


def test_a_client_s_mix_has_the_distribution_of_the_formula() -> None:
    """The first client's share of a label with the prior p is Beta(α p, α (1 - p))."""
    sizes = np.array([60_000, 30_000, 10_000])
    rng = stream(4, "marginal")
    shares = [partitions.balanced_dirichlet(sizes, 10, 3.0, rng)[:, 0] / 10_000 for _ in range(400)]
    for share, prior in zip(np.array(shares).T[:2], (0.6, 0.3), strict=True):
        assert stats.kstest(share, stats.beta(3 * prior, 3 * (1 - prior)).cdf).pvalue > 0.01


@pytest.mark.parametrize("balanced", [False, True])
def test_a_large_alpha_is_iid(balanced: bool) -> None:
    sizes, rng = np.full(10, 6000), stream(5, "iid")
    deal = partitions.balanced_dirichlet if balanced else lambda *a: partitions.dirichlet(*a[:3], 1, a[3])
    counts = deal(sizes, 20, 1e7, rng)
    early = counts[:, :15]  # of balanced clients the last one takes what the others have left
    assert np.abs(early - 300).max() <= (80 if balanced else 2)  # multinomial: 17 is one standard deviation


def test_a_small_alpha_gives_a_label_to_one_client() -> None:
    counts = partitions.dirichlet(np.full(40, 100), 4, 0.001, 1, stream(6, "skew"))
    assert (counts.max(axis=1) >= 99).sum() >= 38


def test_a_small_alpha_gives_a_client_one_label_when_all_are_equally_large() -> None:
    counts = partitions.balanced_dirichlet(np.full(10, 6000), 100, 0.001, stream(7, "skew"))
    assert (counts.sum(axis=0) == 600).all()
    assert (counts.sum(axis=1) == 6000).all()
    assert ((counts > 0).sum(axis=0) == 1).mean() > 0.8


def test_a_dirichlet_split_that_leaves_a_client_without_data_is_refused() -> None:
    with pytest.raises(Impossible, match=r"100 draws with alpha 0.01 the smallest of 500 clients had 0 .* is 1"):
        partitions.dirichlet(np.full(10, 6000), 500, 0.01, 1, stream(8, "poor"))


def test_shards_of_mnist_s_size_give_most_clients_two_digits() -> None:
    """McMahan et al. 2017: 200 shards of 300, "most clients will only have examples of two digits"."""
    owner = partitions.shards(MANY, 100, 2, stream(9, "shards"))
    counts = counts_of(MANY, owner, 100)
    assert (counts.sum(axis=1) == 600).all()
    digits = (counts > 0).sum(axis=1)
    # 6,000 of each digit are 20 whole shards; a client's second one has its digit with the chance 19 / 199
    assert set(digits) == {1, 2}
    assert 82 <= (digits == 2).sum() <= 97


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_a_client_has_at_most_two_labels_for_each_shard(num_clients: int, each: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(5), rng.integers(40, 60, 5)))
    if len(labels) / (num_clients * each) > 40:
        return  # a shard is larger than a label
    owner = partitions.shards(labels, num_clients, each, rng)
    counts = counts_of(labels, owner, num_clients)
    assert ((counts > 0).sum(axis=1) <= 2 * each).all()
    assert counts.sum(axis=1).max() - counts.sum(axis=1).min() <= each


def test_quantity_is_proportional_above_the_minimum_of_each_client() -> None:
    counts = partitions.quantity(1000, np.array([1.0, 3.0, 6.0]), 10, stream(10, "quantity"))[0]
    np.testing.assert_allclose(counts, 10 + 970 * np.array([0.1, 0.3, 0.6]), atol=1)
    assert counts.sum() == 1000


def test_other_examples_follow_in_the_same_proportions() -> None:
    counts = np.array([[30, 10, 0], [0, 5, 5]])
    followed = partitions.following(counts, np.array([400, 100]), stream(11, "test"))
    np.testing.assert_allclose(followed, [[300, 100, 0], [0, 50, 50]], atol=1)


def test_a_label_that_is_only_among_the_others_follows_the_sizes() -> None:
    counts = np.array([[30, 10], [0, 0], [0, 0]])
    followed = partitions.following(counts, np.array([0, 80, 0]), stream(12, "test"))
    np.testing.assert_allclose(followed, [[0, 0], [60, 20], [0, 0]], atol=1)


def test_a_stream_depends_on_its_seed_and_purpose_alone() -> None:
    drawn = {(seed, what): stream(seed, what).random() for seed in (0, 1) for what in ("train", "test")}
    assert len(set(drawn.values())) == 4
    assert stream(1, "test").random() == drawn[1, "test"]
