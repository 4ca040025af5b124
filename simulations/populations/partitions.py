"""The rules of partition: pure functions of arrays, from the examples' labels to the examples' owners.

A partition is an array `owner` (N,) int64 with one of K clients for each of N examples, so that every example belongs
to exactly one client. All kinds but shards first choose `counts` (L, K), the number of examples of each of L labels
for each client; `deal` then draws the examples. Kinds that ignore labels use one label: L = 1, and all labels are 0.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from atoll.ground.printable import count_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

DRAWS = 100
"""Maximum number of draws of a Dirichlet split until every client has the minimum number of examples."""


class Impossible(ValueError):
    """Error: these examples do not allow a split; the message has the numbers."""


def stream(seed: int, *purpose: object) -> np.random.Generator:
    """Return the random generator of one purpose, independent of all other draws."""
    name = " ".join(["atoll population", str(seed), *map(str, purpose)])
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()))


def deal(labels: Ints, counts: Ints, rng: np.random.Generator) -> Ints:
    """Draw owners (N,) so that client k gets counts[y, k] examples of label y, without replacement.

    Args:
        labels: (N,) in 0..L-1.
        counts: (L, K); row y sums to the number of examples with label y.
        rng: the generator of the draw.
    """
    owner = np.empty(len(labels), np.int64)
    order = np.argsort(labels, kind="stable")
    clients, start = np.arange(counts.shape[1]), 0
    for row in counts:
        members = order[start : start + row.sum()]
        owner[rng.permutation(members)] = np.repeat(clients, row)
        start += len(members)
    assert start == len(labels), (start, len(labels))
    return owner


def count(labels: Ints, owner: Ints, num_labels: int, num_clients: int) -> Ints:
    """Return counts (L, K) of a partition: the number of examples of each label 0..L-1 of each client."""
    cells = labels * num_clients + owner
    return np.bincount(cells, minlength=num_labels * num_clients).reshape(num_labels, num_clients)


def even(num_examples: int, num_clients: int) -> Ints:
    """Return counts (K,) that differ by at most one, the larger ones first."""
    clients = np.arange(num_clients)
    return num_examples // num_clients + (clients < num_examples % num_clients).astype(np.int64)


def apportion(sizes: Ints, shares: Floats, rng: np.random.Generator) -> Ints:
    """Draw counts (L, K) with row sums `sizes`, proportional to `shares`: each share is rounded up or down.

    The shares of a row are laid end to end on a line of length n; their ends are moved by one u ~ U[0, 1) and rounded
    down. The probability of rounding up is therefore exactly the remainder, so that small shares are not always lost.

    Args:
        sizes: (L,), the number of examples of each label.
        shares: (L, K), not negative, with positive row sums.
        rng: the generator of the offsets u.
    """
    ends = np.cumsum(shares, axis=1)
    ends *= (sizes / ends[:, -1])[:, None]
    cuts = np.minimum(np.floor(ends + rng.random((len(sizes), 1))).astype(np.int64), sizes[:, None])
    cuts[:, -1] = sizes
    return np.diff(cuts, axis=1, prepend=0)


def dirichlet(
    sizes: Ints,
    num_clients: int,
    alpha: float,
    min_examples: int,
    rng: np.random.Generator,
    *,
    may_be_empty: bool = False,
) -> Ints:
    """Draw counts (L, K) label by label: the clients' shares of a label are one draw from a Dirichlet distribution.

        p_y ~ Dir_K(α, ..., α),    client k gets p_yk n_y examples of label y

    Draws are repeated, up to `DRAWS` times, until every client has `min_examples`, or with `may_be_empty` none. Small
    α: few clients have each label, and sizes differ widely; α to infinity: every client has an even share of every
    label.

    Raises:
        Impossible: in each draw some client has fewer than `min_examples`, and is not an allowed empty one.

    Source:
        Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019, section 4; Li et
        al., "Federated Learning on Non-IID Data Silos" (NIID-Bench), ICDE 2022, distribution-based label imbalance.
        Their code also skips clients that have N / K examples already, which is not a Dirichlet split; this one does
        not.
    """
    smallest = 0
    for _ in range(DRAWS):
        counts = apportion(sizes, rng.dirichlet(np.full(num_clients, alpha), len(sizes)), rng)
        owned = counts.sum(axis=0)
        smallest = max(smallest, int((owned[owned > 0] if may_be_empty else owned).min()))
        if smallest >= min_examples:
            return counts
    dropped = "" if smallest else ", or drop_empty = true (--drop-empty)"
    raise Impossible(
        f"in {DRAWS} draws with alpha {alpha:g} the smallest of "
        f"{count_of(num_clients, 'client')} had {count_of(smallest, 'example')} or "
        f"fewer, and min_examples is {min_examples}; possible are a larger alpha, fewer clients, or balanced = true"
        f"{dropped}"
    )


def balanced_dirichlet(sizes: Ints, num_clients: int, alpha: float, rng: np.random.Generator) -> Ints:
    """Draw counts (L, K) client by client, all of equal size: a client's mix of labels is one draw from a Dirichlet.

        q_k ~ Dir_L(α p),    p_y = n_y / N,    client k draws N / K labels from q_k

    When a label runs out, the client's mix of the remaining labels is drawn again, from Dir(α p) restricted to them.
    Here α counts for all labels together: α = 1 with ten labels is a tenth for each. Small α: one label for each
    client, until the label runs out; α to infinity: IID.

    Source:
        Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
        2019 (arXiv 1909.06335), section 3.
    """
    left, counts = sizes.copy(), np.zeros((len(sizes), num_clients), np.int64)
    alphas = np.maximum(alpha * sizes / sizes.sum(), 1e-9)
    for client, wanted in enumerate(even(int(sizes.sum()), num_clients)):
        while missing := int(wanted - counts[:, client].sum()):
            there = np.flatnonzero(left)
            drawn = np.minimum(rng.multinomial(missing, rng.dirichlet(alphas[there])), left[there])
            counts[there, client] += drawn
            left[there] -= drawn
    return counts


def quantity(num_examples: int, weights: Floats, min_examples: int, rng: np.random.Generator) -> Ints:
    """Draw counts (1, K): each client has `min_examples` and a share of the rest, proportional to its weight."""
    rest = num_examples - min_examples * len(weights)
    assert rest >= 0, (num_examples, len(weights), min_examples)
    return min_examples + apportion(np.array([rest]), weights[None, :], rng)


def shards(labels: Ints, num_clients: int, shards_per_client: int, rng: np.random.Generator) -> Ints:
    """Draw owners (N,): examples sorted by label are cut into equal shards, `shards_per_client` at random per client.

    If the number of shards does not divide N, their sizes differ by one. A client has at most 2 `shards_per_client`
    labels if no label has fewer examples than a shard.

    Source:
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
        section 3: MNIST in 200 shards of 300, two for each of 100 clients.
    """
    num_shards = num_clients * shards_per_client
    owner_of_shard = rng.permutation(np.repeat(np.arange(num_clients), shards_per_client))
    owner = np.empty(len(labels), np.int64)
    owner[np.argsort(labels, kind="stable")] = np.repeat(owner_of_shard, even(len(labels), num_shards))
    return owner


def following(counts: Ints, sizes: Ints, rng: np.random.Generator) -> Ints:
    """Draw counts (L, K) of other examples, such as the test data, in the proportions of a first partition.

    Args:
        counts: (L, K), the first partition.
        sizes: (L,), the number of other examples of each label. A label that the first partition lacks follows the
            clients' sizes.
        rng: the generator of the rounding.
    """
    known = counts.sum(axis=1, keepdims=True) > 0
    return apportion(sizes, np.where(known, counts, counts.sum(axis=0)).astype(float), rng)
