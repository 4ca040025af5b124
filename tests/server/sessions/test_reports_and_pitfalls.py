"""Faults of secure sums that others have reported, and pitfalls of our own list: the smallest input of each.

Those with a test elsewhere: a zero update and the norm over all shards (`tensors/masked/test_encode`, `test_parts`),
overflow (`tensors/secure/test_vector`), masks and weights that disagree (`aggregation/masked/test_fold`), dropout after
the shares (`test_schedules`), odd sizes (`tensors/secure/test_positions`), shares kept (`journal/test_reveals`).
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from atoll.client.secure.member import Mask
from atoll.ground.strict_json import ManifestError
from atoll.protocol.secure.boxes import Shares
from atoll.protocol.secure.messages import Boxes, Opening
from atoll.protocol.secure.terms import read_terms
from atoll.server.opening.streams import open_sum
from tests.server.sessions.small_federation import sites_of, terms_of
from tests.server.sessions.test_lies import Honest


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan"), float("inf")])
def test_a_range_of_clipping_that_is_none_is_refused(norm):
    with pytest.raises(ManifestError, match="clip_norm"):
        read_terms(replace(terms_of(), clip_norm=norm).canonical())


def test_generators_that_a_coordinator_can_seed_draw_nothing_of_a_session():
    """Seeded alike, as a task's training is, two members have no secret in common, and neither have two attempts."""
    drawn = []
    site = sites_of(3)[0]
    for attempt in (1, 1, 2):
        random.seed(0)
        np.random.seed(0)
        member = site.member(terms_of(attempt=attempt))
        member.start()
        secrets = member._secrets
        drawn += [secrets.seed, secrets.mask.private_bytes_raw(), secrets.box.private_bytes_raw()]
    assert len({*drawn}) == len(drawn) == 9
    assert np.random.get_state()[2] == 624, "numpy's generator has drawn nothing"


def test_no_box_and_no_pair_has_the_key_of_another():
    """A box has the nonce 0, so its key seals once: in one direction, of one pair, in one session."""
    keys: list[bytes] = []
    for terms in (terms_of(), terms_of(attempt=2)):
        honest = Honest(terms=terms, sites=None)
        honest.masked()
        keys += [key for member in honest.members for key in member._secrets.boxes.values()]
        pairs = [key for member in honest.members for key in member._secrets.masks.values()]
        assert sorted(pairs.count(key) for key in {*pairs}) == [2] * 10, "both members of a pair have its key"
        keys += {*pairs}
    assert len({*keys}) == len(keys) == 2 * (20 + 10)


def test_no_text_of_an_effect_has_a_key_or_a_share():
    honest = Honest()
    boxes = Boxes(honest.shared()[0].boxes)
    secrets = honest.members[0]._secrets
    [mask] = honest.members[0].ask(boxes)
    assert isinstance(mask, Mask)
    said = repr(mask) + repr(secrets.shares) + str(vars(honest.members[0]))
    hidden = [
        *(stream.key for stream in mask.streams),
        secrets.seed,
        *(str(each.seed) for each in secrets.shares.values()),
    ]
    assert all((repr(each) if isinstance(each, bytes) else each) not in said for each in hidden)
    assert repr(Shares(5, 6)) == "Shares()"


def test_no_text_of_an_opening_has_a_key():
    honest = Honest()
    signatures = honest.agreed()
    session = honest.members[0]._session
    reveals = {number: honest.ask(Opening(signatures), number).shares for number in range(5)}
    opened = open_sum(honest.roster, session, honest.survivors, honest.survivors, reveals)
    assert repr(opened) == f"Opened(streams=({', '.join(['Taken(sign=-1)'] * 5)}), wrong=frozenset())"
