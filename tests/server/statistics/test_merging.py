"""What may be shown of statistics, part by part, and the collection that gathers them."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.disclosure import Disclosure, MetricsLeave
from atoll.protocol.vocabulary import ClientId
from atoll.server.statistics import collection, results
from atoll.server.statistics.collection import SILENT, Collection
from atoll.server.statistics.merging import IN_SUMS_ALONE, Shown, document, shown
from atoll.training.statistics.parts import Histogram, Moments, Numbers, Place, SiteStatistics, count

ALL: Place = ("train", "examples", "")
AGE: Place = ("train", "features", "age")
ALONE, MERGED = Disclosure(MetricsLeave.PER_SITE), Disclosure(MetricsLeave.MERGED)


def merged_of(least: int) -> Disclosure:
    return Disclosure(MetricsLeave.MERGED, least)


def shown_of(**sites: tuple[int, Disclosure]) -> Shown:
    answers = {ClientId(name): SiteStatistics({ALL: count(number)}) for name, (number, _) in sites.items()}
    return shown(answers, {ClientId(name): terms for name, (_, terms) in sites.items()})


def test_sites_that_allow_it_are_shown_alone_and_summed() -> None:
    found = shown_of(a=(1, ALONE), b=(2, ALONE))
    assert found.sums == {ALL: (count(3), 2)}
    assert found.sites == {"a": {ALL: count(1)}, "b": {ALL: count(2)}}
    assert (found.not_summed, found.not_alone) == ({}, {})


def test_two_sites_in_sums_alone_hide_in_each_other() -> None:
    found = shown_of(a=(1, ALONE), b=(2, MERGED), c=(4, MERGED))
    assert found.sums == {ALL: (count(7), 3)}
    assert found.sites == {"a": {ALL: count(1)}}
    assert found.not_alone == {"b": IN_SUMS_ALONE, "c": IN_SUMS_ALONE}


@pytest.mark.parametrize("least", [0, 1, 2])
def test_a_single_one_is_not_told_apart_by_the_others(least: int) -> None:
    found = shown_of(a=(1, ALONE), b=(2, merged_of(least)))
    assert found.sums == {ALL: (count(3), 2)}
    assert not found.sites
    assert "the rest of the total would be theirs" in found.not_alone["a"]


def test_a_sum_over_fewer_sites_than_one_asks_for_is_not_shown() -> None:
    found = shown_of(a=(1, ALONE), b=(2, merged_of(3)))
    assert (found.sums, found.sites) == ({}, {})
    assert found.not_summed == {ALL: "2 sites give it, and sums of at least 3 are allowed"}
    assert shown_of(a=(1, ALONE), b=(2, merged_of(3)), c=(3, merged_of(3))).sums == {ALL: (count(6), 3)}


def test_a_single_site_in_sums_alone_has_no_sum() -> None:
    assert shown_of(a=(1, MERGED)).not_summed == {ALL: "1 site gives it, and sums of at least 2 are allowed"}


def test_each_part_is_judged_by_the_sites_that_gave_it() -> None:
    """`b` has left the age out, so that `a` alone would be in its sum."""
    part = Moments(1, 0, 0, Fraction(1), Fraction(1))
    answers = {
        ClientId("a"): SiteStatistics({ALL: count(1), AGE: part}),
        ClientId("b"): SiteStatistics({ALL: count(2)}, {AGE: "fewer than 10 values"}),
    }
    found = shown(answers, {})
    assert found.sums == {ALL: (count(3), 2)}
    assert found.not_summed.keys() == {AGE}
    assert found.left_out == {"b": {AGE: "fewer than 10 values"}}


def test_a_part_of_another_shape_is_left_out_and_its_site_is_named() -> None:
    place: Place = ("train", "own", "x")
    shapes = {"a": (2,), "b": (2,), "c": (3,)}
    answers = {
        ClientId(name): SiteStatistics({place: Numbers("sum", shape, (Fraction(1),) * shape[0])})
        for name, shape in shapes.items()
    }
    found = shown(answers, dict.fromkeys(answers, ALONE))
    assert found.sums == {place: (Numbers("sum", (2,), (Fraction(2), Fraction(2))), 2)}
    assert found.left_out == {"c": {place: "of a different kind or shape than at the other sites"}}


def test_extremes_are_those_of_all_or_none() -> None:
    def extremes(*values: float | None) -> Any:
        parts = [Moments(1, 0, 0, Fraction(1), Fraction(1), value, value) for value in values]
        answers = {ClientId(str(k)): SiteStatistics({AGE: part}) for k, part in enumerate(parts)}
        return document(shown(answers, {}))["merged"]["train"]["features"]["age"]

    assert extremes(3.0, 1.0)["min"] == 1.0
    assert extremes(3.0, 1.0)["max"] == 3.0
    assert "min" not in extremes(3.0, None)


def test_the_document_has_labels_in_order_and_what_is_withheld() -> None:
    labels: Place = ("train", "labels", "target")
    answers = {
        ClientId("a"): SiteStatistics({ALL: count(30), labels: Histogram({"10": 10, "2": 20})}),
        ClientId("b"): SiteStatistics({ALL: count(30), labels: Histogram({"2": 20}, 2)}),
    }
    found = document(shown(answers, dict.fromkeys(answers, ALONE)))
    assert found["merged"]["train"] == {
        "examples": 60,
        "sites": 2,
        "labels": {"target": {"counts": {"2": 40, "10": 10}, "withheld": 2, "sites": 2}},
    }
    assert list(found["merged"]["train"]["labels"]["target"]["counts"]) == ["2", "10"]
    assert found["sites"]["a"]["train"]["examples"] == 30


terms = st.builds(Disclosure, st.sampled_from([MetricsLeave.PER_SITE, MetricsLeave.MERGED]), st.integers(0, 4))
sites = st.dictionaries(st.sampled_from("abcdef").map(ClientId), st.tuples(st.integers(1, 9), terms), min_size=1)


@given(sites)
def test_nothing_that_is_shown_tells_a_site_apart_that_allows_sums_alone(
    sites: dict[ClientId, tuple[int, Disclosure]],
) -> None:
    found = shown_of(**sites)
    hidden = {name for name, (_, term) in sites.items() if term.metrics is MetricsLeave.MERGED}
    assert not hidden & found.sites.keys()
    if ALL in found.sums:
        assert found.sums[ALL] == (count(sum(number for number, _ in sites.values())), len(sites))
        assert len(sites) >= max(term.min_sites for _, term in sites.values())
        rest = sites.keys() - found.sites.keys()
        assert not hidden or len(rest) >= 2, "the sum less those who are shown is of several"


def test_the_order_of_arrival_changes_nothing() -> None:
    numbers = {"a": (0.1, ALONE), "b": (0.2, ALONE), "c": (0.3, ALONE)}
    documents = []
    for order in (sorted(numbers), sorted(numbers, reverse=True)):
        answers = {
            ClientId(name): SiteStatistics({("train", "own", "x"): Numbers("sum", (), (Fraction(numbers[name][0]),))})
            for name in order
        }
        documents.append(document(shown(answers, dict.fromkeys(answers, ALONE))))
    assert documents[0] == documents[1]


# ---------------------------------------------------------------- the collection


def test_a_collection_is_complete_when_every_site_has_answered_or_failed() -> None:
    asked = Collection(frozenset(map(ClientId, "abc")))
    asked.answered(ClientId("a"), SiteStatistics({}), ALONE, 5)
    asked.answered(ClientId("x"), SiteStatistics({}), ALONE, 5)
    asked.failed(ClientId("a"), "too late: it has answered")
    asked.failed(ClientId("b"), "lost: left")
    assert (asked.is_complete, asked.is_waiting_for(ClientId("c"))) == (False, True)
    asked.close()
    assert asked.is_complete
    assert asked.answers.keys() == {"a"}
    assert asked.failures == {"b": "lost: left", "c": SILENT}


def test_answers_beyond_the_room_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "BYTES_MAX", 9)
    asked = Collection(frozenset(map(ClientId, "ab")))
    asked.answered(ClientId("a"), SiteStatistics({}), ALONE, 5)
    asked.answered(ClientId("b"), SiteStatistics({}), ALONE, 5)
    assert asked.failures == {"b": collection.NO_ROOM}


def test_results_are_kept_by_number(tmp_path: Any) -> None:
    with pytest.raises(LookupError, match="no statistics were requested yet"):
        results.read(tmp_path)
    for number in (1, 2):
        results.keep(tmp_path, number, {"number": number})
    (tmp_path / "statistics" / "worker.log").write_text("no result")
    assert [results.read(tmp_path, number)["number"] for number in (1, 2, 0)] == [1, 2, 2]
    with pytest.raises(LookupError, match="there are no statistics 3; there are 1 to 2"):
        results.read(tmp_path, 3)
    (tmp_path / "statistics" / "000002.json").write_text("{")
    with pytest.raises(OSError, match="is damaged"):
        results.read(tmp_path)
