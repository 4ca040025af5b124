"""Samplers: seeded, reproducible draws of a cohort from the available clients. Pure.

A draw depends on (seed, round, its number in the round, set of candidates) alone: not on the order of arrival, the
process or its hash seed.
"""

import bisect
import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from atoll.ground.printable import count_of
from atoll.plugins.guard import called
from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.server.members.member import Candidate
from atoll.server.selection.oort import Oort
from atoll.server.selection.weighted_draws import evenly, in_proportion

Sampler = Callable[[Sequence[Candidate], int, random.Random], Sequence[ClientId]]
"""(candidates sorted by client id, largest number of clients, random numbers of the round) -> clients to invite."""


class SamplerError(ValueError):
    """Error: a sampler raised, or its answer is not a cohort of its candidates."""


def draw(
    sampler: Sampler | Oort,
    *,
    seed: int,
    round_id: RoundId,
    count: int,
    candidates: Sequence[Candidate],
    number: int = 0,
    relaxed: int = 0,
) -> tuple[ClientId, ...]:
    """Draw a cohort, sorted by client id.

    Args:
        sampler: one of `SAMPLERS`, or a custom one.
        seed: the seed of the run.
        round_id: the round; each has its own random numbers.
        count: largest size of the cohort, >= 1; with fewer candidates, the built-in samplers draw all of them.
        candidates: distinct clients, in any order.
        number: the draw within the round; each has its own random numbers.
        relaxed: `Pacer.relaxed`, which only Oort uses.

    Raises:
        SamplerError: there are no candidates; the sampler raised; or its answer is empty, too large, names a client
            twice or names a client that is not a candidate.
    """
    assert count >= 1, count
    if not candidates:
        raise SamplerError("there are no candidates")
    ordered = sorted(candidates, key=_CLIENT_ID)
    of_the_round = sampler.at(round_id, relaxed) if isinstance(sampler, Oort) else sampler
    randomness = _randomness(seed, round_id, number)
    drawn: list[ClientId] = called(
        "the sampler", lambda: list(of_the_round(tuple(ordered), count, randomness)), failed=SamplerError
    )
    for client in drawn:
        if not isinstance(client, str) or not _is_among(client, ordered):
            raise SamplerError(
                f"the sampler named {client!r}, which is not one of the {count_of(len(ordered), 'candidate')}"
            )
    if not 1 <= len(drawn) <= count:
        raise SamplerError(f"the sampler named {count_of(len(drawn), 'client')}; allowed: 1 to {count}")
    if len(set(drawn)) < len(drawn):
        raise SamplerError(f"the sampler named {Counter(drawn).most_common(1)[0][0]!r} more than once")
    return tuple(sorted(drawn))


_CLIENT_ID = itemgetter(0)  # half the time that `attrgetter` takes


def _is_among(client: ClientId, ordered: Sequence[Candidate]) -> bool:
    at = bisect.bisect_left(ordered, client, key=_CLIENT_ID)
    return at < len(ordered) and ordered[at].client_id == client


def _randomness(seed: int, round_id: RoundId, number: int) -> random.Random:
    name = f"atoll cohort {seed} {round_id}" + (f" {number}" if number else "")
    return random.Random(hashlib.sha256(name.encode("ascii")).digest())


def uniform(candidates: Sequence[Candidate], count: int, rng: random.Random) -> list[ClientId]:
    """Draw without replacement; every set of `count` clients is equally likely."""
    return [candidate.client_id for candidate in evenly(count, candidates, rng)]


def weighted(candidates: Sequence[Candidate], count: int, rng: random.Random) -> list[ClientId]:
    """Draw one after another without replacement, each time with probability proportional to `num_examples`.

    A client that reports no number of examples (0) counts as one example: it is drawn rarely, but not excluded.

    The aggregate weights by num_examples a second time, so large clients count more than in the pooled data.
    """
    return [candidate.client_id for candidate in _by_size(count, candidates, rng)]


def _by_size(count: int, candidates: Sequence[Candidate], rng: random.Random) -> list[Candidate]:
    return in_proportion(count, [max(1, candidate.num_examples) for candidate in candidates], candidates, rng)


def power_of_choice(
    candidates: Sequence[Candidate], count: int, rng: random.Random, *, num_considered: int
) -> list[ClientId]:
    """Draw `num_considered` clients as `weighted` does, and keep the `count` of them with the largest loss.

    The loss is the mean training loss of a client's newest accepted update; no client is asked for it beforehand.
    Clients without a loss come first, in the order of the draw. A client that claims a large loss is chosen more often:
    use this sampler with clients whose reports are trusted.

    Source:
        Cho, Wang, Joshi, "Client Selection in Federated Learning: Convergence Analysis and Power-of-Choice Selection
        Strategies", arXiv:2010.01243, the variant rpow-d: stale losses, infinite at first.
    """
    considered = _by_size(num_considered, candidates, rng)
    considered.sort(key=lambda candidate: math.inf if candidate.loss is None else candidate.loss, reverse=True)
    return [candidate.client_id for candidate in considered[:count]]


def stratified(candidates: Sequence[Candidate], count: int, rng: random.Random) -> list[ClientId]:
    """Draw from each label its proportional number of clients, uniformly within.

    Proportional to the number of clients, not to their examples: so every client has the same chance as under
    `uniform`, the aggregate estimates the same mean, and only the variance between the labels is removed.
    """
    count = min(count, len(candidates))
    strata: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        strata.setdefault(candidate.label, []).append(candidate)
    seats = allocate(count, {label: len(members) for label, members in sorted(strata.items())}, rng)
    return [client for label, num in seats.items() for client in uniform(strata[label], num, rng)]


def allocate(count: int, sizes: Mapping[str, int], rng: random.Random) -> dict[str, int]:
    """Divide `count` seats among strata in proportion to their sizes: each gets its share rounded down or up.

    Every stratum has floor(share) seats. The remaining seats are drawn, with probabilities exactly equal to the
    remainders. The method of largest remainders is unfit, because they are the same in every round: with nine clients
    of one label and one of another, two seats are shared 1.8 to 0.2, and the single client would never be chosen.

    The lot is one systematic draw over the strata in random order, in integers: with remainders r_i = count * size_i
    mod total, laid end to end on a line, the strata under u, u + total, u + 2 total, ... win, for u uniform in
    0..total-1. No r_i reaches total, so none wins twice.

    Source:
        Madow, "On the theory of systematic sampling, II", Annals of Mathematical Statistics 20 (1949).
    """
    total = sum(sizes.values())
    order = evenly(len(sizes), tuple(sizes), rng)
    at = int(rng.random() * total)
    seats = {}
    for label in order:
        floor, remainder = divmod(count * sizes[label], total)
        seats[label] = floor + (at < remainder)
        at += total * (at < remainder) - remainder
    return seats


SAMPLERS: Mapping[str, Sampler] = {"uniform": uniform, "weighted": weighted, "stratified": stratified}
