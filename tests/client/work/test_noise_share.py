"""A site's share of the noise: the same bits for one attempt, other ones for everything else, and of no public seed."""

import random

import numpy as np
import torch

from atoll.client.work.noise_share import share_of
from atoll.tensors.secure.vector import share_of_noise
from tests.server.sessions.small_federation import privacy_of, terms_of

SECRET, SESSION = bytes(range(32)), bytes(32)


def bits(secret=SECRET, session=SESSION, **changes):
    share = share_of(secret, terms_of(**{"privacy": privacy_of().text(), **changes}), session)
    assert share is not None
    return tuple(share.between("w", 200, 0, 200).tolist())


def test_an_attempt_has_the_same_noise_again_and_everything_else_has_another():
    kinds = [
        bits(),
        bits(attempt=2),
        bits(session=bytes([1]) * 32),
        bits(round=2),
        bits(run="digits-2"),
        bits(model="cd" * 32),
        bits(secret=bytes(32)),
    ]
    assert bits() == kinds[0]
    assert len({*kinds}) == len(kinds)


def test_the_deviation_is_that_of_the_terms():
    share = share_of(SECRET, terms_of(privacy=privacy_of(3, 1).text()), SESSION)
    assert share is not None
    assert share.deviation == share_of_noise(32, 1.5, 3)
    assert np.std(share.between("w", 100_000, 0, 100_000)) / share.deviation - 1 < 0.02


def test_no_noise_is_added_where_the_terms_ask_for_none():
    assert share_of(SECRET, terms_of(), SESSION) is None
    assert share_of(SECRET, terms_of(privacy=privacy_of(0, 0, noise_by="coordinator").text()), SESSION) is None


def test_public_seeds_do_not_move_it():  # dishonest move 46
    first = bits()
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        assert bits() == first
