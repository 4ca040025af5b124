"""The terms of a session: one form of their bytes, and only values in range."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.ground.strict_json import ManifestError
from atoll.protocol.secure.terms import read_terms
from tests.server.sessions.small_federation import terms_of


@given(
    st.builds(
        terms_of,
        round=st.integers(0, 2**53),
        attempt=st.integers(1, 100),
        purpose=st.sampled_from(["update", "evaluation", "statistics"]),
        bits=st.sampled_from([32, 64]),
        clip_norm=st.floats(min_value=1e-300, max_value=1e300),
        threshold=st.sampled_from(["two_thirds", "2", "64"]),
        receivers=st.sets(st.integers(0, 4095)).map(lambda ranks: tuple(sorted(ranks))),
        task=st.text(max_size=20),
    )
)
def test_terms_are_read_back(terms):
    assert read_terms(terms.canonical()) == terms
    assert read_terms(terms.canonical()).digest == terms.digest


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *[("protocol", 2), ("round", -1), ("round", True), ("round", 1.0), ("attempt", 0), ("attempt", 101)],
        *[("bits", 16), ("bits", "32"), ("bits", 32.0), ("purpose", "model"), ("model", "AB" * 32), ("layout", "")],
        *[("clip_norm", 1.0), ("clip_norm", "7ff0000000000000"), ("clip_norm", "8000000000000000")],
        *[("clip_norm", "7ff8000000000000"), ("clip_norm", "bff0000000000000"), ("clip_norm", "3FF0000000000000")],
        *[("members_max", 2), ("members_max", 65), ("threshold", "65"), ("threshold", "1"), ("threshold", "03")],
        *[
            ("threshold", 3),
            ("threshold", "\u0663"),
            ("receivers", [1, 0]),
            ("receivers", [0, 0]),
            ("receivers", [4096]),
        ],
        *[("run", 7), ("local", "x" * 20_000), ("more", 1)],
    ],
)
def test_values_out_of_range_are_refused(name, wrong):
    document = {**json.loads(terms_of().canonical()), name: wrong}
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(ManifestError, match=name):
        read_terms(data)


def test_another_form_of_the_same_terms_is_refused():
    with pytest.raises(ManifestError, match="not canonical"):
        read_terms(json.dumps(json.loads(terms_of().canonical())).encode())
    for data in (b"", b"[]", b"{}", b"\xff", b"{" * 10_000):
        with pytest.raises(ManifestError):
            read_terms(data)


@pytest.mark.parametrize(
    ("members", "expected"), [(3, 3), (4, 3), (5, 4), (6, 5), (7, 5), (9, 7), (12, 9), (20, 14), (64, 43)]
)
def test_two_thirds_is_the_floor_and_one_more(members, expected):
    assert terms_of().threshold_of(members) == expected
    assert 3 * expected > 2 * members >= 3 * (expected - 1)


def test_what_a_site_approves_is_the_same_in_all_rounds():
    terms = terms_of()
    later = terms_of(round=9, attempt=3, session=2, base=8, model="cd" * 32, ranges="ef" * 32)
    assert terms.approved == later.approved
    assert terms.digest != later.digest
    for name, other in {"clip_norm": 2.0, "bits": 64, "layout": "cd" * 32, "frozen": "ab", "privacy": "{}"}.items():
        assert terms_of(**{name: other}).approved != terms.approved
