"""The privacy in a sum's terms: one form, values within their ranges, and another approval for each change."""

import json
import math
from dataclasses import asdict, fields, replace

import pytest

from atoll.ground.strict_json import ManifestError
from atoll.protocol.secure.privacy_terms import PrivacyTerms, read_privacy
from atoll.protocol.secure.terms import read_terms
from tests.server.sessions.small_federation import privacy_of, terms_of

CHANGES = {
    "epsilon": 9.0,
    "delta": 1e-5,
    "noise_multiplier": 1.4,
    "participations_max": 11,
    "divisor": 4,
    "honest_min": 2,
    "colluders": 2,
}


def private_terms(privacy, **changes):
    return terms_of(**{"privacy": privacy.text(), "examples_max": 0, **changes})


def test_terms_come_back_as_they_are():
    for privacy in (privacy_of(), privacy_of(0, 0, noise_by="coordinator"), privacy_of(epsilon=1e-9, delta=0.1 + 0.2)):
        assert read_privacy(privacy.text()) == privacy
        terms = private_terms(privacy)
        assert read_terms(terms.canonical()) == terms
    assert read_privacy("") is None
    assert privacy_of(5, 2).sum_min == 7
    assert privacy_of(0, 0, noise_by="coordinator").sum_min == 0


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_another_approval_and_no_session_with_the_terms_before(name):  # dishonest moves 7, 42
    before, after = private_terms(privacy_of()), private_terms(replace(privacy_of(), **{name: CHANGES[name]}))
    assert before.approved != after.approved
    assert before.digest != after.digest
    assert {*CHANGES} == {field.name for field in fields(PrivacyTerms)} - {"unit", "noise_by"}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("unit", ["row", "", 1]),
        ("noise_by", ["site", None]),
        ("epsilon", ["", "7ff0000000000000", "7ff8000000000000", "0000000000000000", 8.0, "bff0000000000000"]),
        ("delta", ["3ff0000000000000", "0000000000000000"]),
        ("noise_multiplier", ["0000000000000000"]),
        ("participations_max", [0, True, 2**54]),
        ("divisor", [0, -1, 1.0]),
        ("honest_min", [0, -3, 65, "3"]),
        ("colluders", [-1, 65]),
    ],
)
def test_values_out_of_range_are_refused(name, values):
    document = json.loads(privacy_of().text())
    for value in values:
        text = json.dumps({**document, name: value}, sort_keys=True, separators=(",", ":"))
        with pytest.raises(ManifestError, match=f"terms.privacy.{name}"):
            read_privacy(text)


@pytest.mark.parametrize("text", ["{}", "[]", "x", '{"unit":"client"}', privacy_of().text() + " ", "{" * 5000])
def test_other_texts_are_refused(text):
    with pytest.raises(ManifestError):
        read_privacy(text)


def test_an_unknown_field_is_refused():
    document = {**json.loads(privacy_of().text()), "more": 1}
    with pytest.raises(ManifestError, match="more"):
        read_privacy(json.dumps(document, sort_keys=True, separators=(",", ":")))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"metrics": (("loss", 2),)}, "no metrics, and equal weights"),
        ({"examples_max": 10}, "no metrics, and equal weights"),
        ({"purpose": "evaluation"}, "in a sum of updates"),
        ({"members_max": 4}, "honest_min"),
    ],
)
def test_terms_that_would_release_more_or_that_no_session_meets_are_refused(changes, fault):
    terms = private_terms(privacy_of(4, 1), **changes)
    with pytest.raises(ManifestError, match=fault):
        read_terms(terms.canonical())


def test_numbers_are_exact():
    assert math.isclose(privacy_of().noise_multiplier, 1.5)
    text = privacy_of(noise_multiplier=math.nextafter(1.5, 2)).text()
    found = read_privacy(text)
    assert found is not None
    assert asdict(found)["noise_multiplier"] == math.nextafter(1.5, 2)
