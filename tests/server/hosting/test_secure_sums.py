"""Messages of members at the coordinator: each counts for the client whose connection brings it, and for no other."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.client.secure.member import Send
from atoll.protocol.identity.certificates import to_pem
from atoll.protocol.secure import wire
from atoll.protocol.secure.messages import MemberKeys
from atoll.protocol.vocabulary import ClientId, FailureReason, RoundId, RunId
from atoll.server.hosting import secure_sums
from atoll.server.hosting.secure_sums import check_keys, member_event
from atoll.server.rounds.session_events import KeysCame, SessionLeft
from tests.client.site.sites import CA, NOW, sites_of
from tests.server.sessions.small_federation import terms_of

LOW_ORDER_POINTS = [
    bytes.fromhex(digits)
    for digits in (
        "00" * 32,
        "01" + "00" * 31,
        "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
        "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
]
"""All points of low order of Curve25519 (cr.yp.to/ecdh.html, "validate"), below 2^255."""

NAME = wire.SessionName(RunId("digits-1"), RoundId(1), 1, 0)


def test_dishonest_move_57_keys_under_another_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection under another's name ends with PERMISSION_DENIED (`tests/wire/test_mutual.py`)."""
    monkeypatch.setattr(secure_sums, "time", SimpleNamespace(time=lambda: NOW))
    sites, terms = sites_of(tmp_path, 4), terms_of()
    keys = [_keys_of(site, terms) for site in sites]
    for seed in range(20):
        draw = random.Random(f"name {seed}")
        liar, victim = draw.sample(range(4), 2)
        name = ClientId(sites[liar].name)
        renamed = replace(keys[victim], name=name)
        signed = replace(renamed, signature=sites[liar].security._key.sign(renamed.statement()))
        borrowed = replace(keys[liar], site=replace(keys[liar].site, certificate=keys[victim].site.certificate))
        borrowed = replace(borrowed, signature=sites[liar].security._key.sign(borrowed.statement()))
        moves = {
            "its keys are of site-": keys[victim],
            "its keys are not signed by its site key": draw.choice([renamed, signed]),
            f"certified by client {sites[victim].name}": borrowed,
        }
        for reason, move in moves.items():
            found = _event(name, move, terms)
            assert isinstance(found, SessionLeft)
            assert (found.client_id, found.reason) == (name, FailureReason.SESSION_REFUSED)
            assert reason in found.detail
        own = _event(name, keys[liar], terms)
        assert isinstance(own, KeysCame)
        assert own.client_id == name


@pytest.mark.parametrize("kind", ["mask_key", "box_key"])
def test_dishonest_move_21_keys_of_low_order_cost_their_sender_its_place_and_no_other_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Enough members that let them pass would end the coordinator, which exchanges keys as it opens the sum."""
    monkeypatch.setattr(secure_sums, "time", SimpleNamespace(time=lambda: NOW))
    [site, *_], terms = sites_of(tmp_path, 3), terms_of()
    keys = _keys_of(site, terms)
    for low in LOW_ORDER_POINTS:
        unsigned = replace(keys, **{kind: low})
        move = replace(unsigned, signature=site.security._key.sign(unsigned.statement()))
        found = _event(ClientId(site.name), move, terms)
        assert isinstance(found, SessionLeft)
        assert f"its {kind.replace('_', ' ')} is a point of low order" in found.detail


def _keys_of(site: Any, terms: Any) -> MemberKeys:
    [keys] = [effect.message for effect in site.member(terms).start() if isinstance(effect, Send)]
    assert isinstance(keys, MemberKeys)
    return keys


def _event(name: ClientId, keys: MemberKeys, terms: Any) -> Any:
    def check(_: KeysCame, read: MemberKeys) -> None:
        check_keys(read, name, terms, to_pem(CA.certificate))

    return member_event(name, wire.answer_message(NAME, keys), "update", check, None)
