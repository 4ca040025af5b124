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


def _keys_of(site: Any, terms: Any) -> MemberKeys:
    [keys] = [effect.message for effect in site.member(terms).start() if isinstance(effect, Send)]
    assert isinstance(keys, MemberKeys)
    return keys


def _event(name: ClientId, keys: MemberKeys, terms: Any) -> Any:
    def check(_: KeysCame, read: MemberKeys) -> None:
        check_keys(read, name, terms, to_pem(CA.certificate))

    return member_event(name, wire.answer_message(NAME, keys), "update", check, None)
