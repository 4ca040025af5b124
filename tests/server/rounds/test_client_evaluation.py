"""The sums and the single answers of an evaluation that may be shown."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.disclosure import Disclosure, MetricsLeave
from atoll.protocol.vocabulary import ClientId, Version
from atoll.server.rounds.client_evaluation import IN_SUMS_ALONE, NO_SUMS, ClientEvaluation, shown_alone, shown_sum
from atoll.server.rounds.events import ClientEvaluated

PER_SITE, MERGED = MetricsLeave.PER_SITE, MetricsLeave.MERGED


def closed(**sites):
    """Close an evaluation in which each site has answered on its terms; None: it has not answered."""
    evaluation = ClientEvaluation(Version(7), 60.0, sorted(map(ClientId, sites)))
    for number, (site, terms) in enumerate(sites.items(), 1):
        if terms is not None:
            sums = {"loss": (float(number), 10.0)}
            evaluation.answered(ClientEvaluated(ClientId(site), Version(7), sums, disclosure=Disclosure(*terms)))
    return evaluation.close()


def test_sites_that_allow_it_are_shown_alone_and_the_others_have_a_reason():
    found, reasons = shown_alone(closed(a=(PER_SITE, 1), b=(PER_SITE, 1), c=(MERGED, 1), d=(MERGED, 1), e=None))
    assert found == {"a": {"loss": (1.0, 10.0)}, "b": {"loss": (2.0, 10.0)}}
    assert reasons == {"c": IN_SUMS_ALONE, "d": IN_SUMS_ALONE, "e": "did not answer in time"}


def test_where_the_rest_of_the_sum_would_tell_a_site_apart_nobody_is_shown_alone():
    """The sum of all minus the others' would be the one site's own."""
    it = closed(a=(PER_SITE, 1), b=(PER_SITE, 1), c=(MERGED, 1))
    found, reasons = shown_alone(it)
    assert found == {}
    assert reasons["a"] == reasons["b"] != reasons["c"]
    assert "the rest of the total would be theirs" in reasons["a"]
    assert shown_sum(it)[0].sums == {"loss": (6.0, 30.0)}


def test_a_sum_over_fewer_sites_than_one_asks_for_is_not_shown():
    found, why = shown_sum(closed(a=(MERGED, 3), b=(MERGED, 1), c=None))
    assert (found.sums, why) == (None, "2 sites have answered, and a site allows sums of at least 3")
    found, why = shown_sum(closed(a=(MERGED, 3), b=(MERGED, 1), c=(PER_SITE, 1)))
    assert (found.sums, why) == ({"loss": (6.0, 30.0)}, "")


TERMS = st.one_of(st.none(), st.tuples(st.sampled_from([PER_SITE, MERGED]), st.integers(0, 5)))


@given(st.dictionaries(st.sampled_from("abcdefgh"), TERMS, min_size=1))
def test_what_is_shown_never_tells_fewer_hidden_sites_apart_than_they_ask_for(sites):
    it = closed(**sites)
    sums, (alone, reasons) = shown_sum(it)[0].sums, shown_alone(it)
    answered = {site: terms for site, terms in sites.items() if terms is not None}
    assert {*alone} | {*reasons} == {*sites}
    assert all(answered[site][0] is PER_SITE for site in alone)
    hidden = {site: terms for site, terms in answered.items() if site not in alone}
    asks = max((terms[1] for terms in answered.values()), default=0)
    if sums is not None:
        assert len(answered) >= asks
        if alone and hidden:  # the rest of the sum is that of the hidden sites
            assert len(hidden) >= max(2, asks)


def answers(**sites):
    """Close an evaluation with these answers."""
    evaluation = ClientEvaluation(Version(7), 60.0, sorted(map(ClientId, sites)))
    for site, sums in sites.items():
        evaluation.answered(ClientEvaluated(ClientId(site), Version(7), sums, disclosure=Disclosure(MERGED, 2)))
    return evaluation.close()


def test_an_answer_of_another_form_is_left_out_of_that_metric_alone():
    it = answers(a={"loss": (1.0, 3.0), "f": (1.0,)}, b={"loss": (2.0, 30.0), "f": (1.0, 2.0)}, c={"f": (4.0,)})
    found, why = shown_sum(it)
    assert found.sums == {"f": (5.0,), "loss": (3.0, 33.0)}
    assert (found.num_clients, why) == (3, "")
    assert found.left_out == {"b": "metric 'f': 2 sums, not 1 like the others"}


def test_a_metric_over_fewer_sites_than_one_asks_for_has_no_sum():
    """It would tell the one site's own."""
    found, _ = shown_sum(answers(a={"loss": (1.0, 3.0), "f": (1.0,)}, b={"loss": (2.0, 30.0), "f": ()}))
    assert found.sums == {"f": (), "loss": (3.0, 33.0)}


def test_a_client_without_a_finite_sum_has_not_evaluated():
    it = answers(a={"loss": (1.0, 3.0)}, b={"loss": (2.0, 3.0)}, c={"loss": ()}, d={})
    assert shown_sum(it)[0].num_clients == 3, "an answer without metrics, as of a Flower app, is one"
    assert it.refused == {"c": NO_SUMS}
    assert not it.failures


def test_a_count_above_what_the_client_may_claim_is_left_out_and_named():
    evaluation = ClientEvaluation(Version(7), 60.0, [ClientId("a"), ClientId("b")])
    sums = {"loss": (0.0, 1e15), "accuracy": (3.0, 10.0), "bins": (1e16, 0.0, 1e16)}
    evaluation.answered(ClientEvaluated(ClientId("a"), Version(7), sums), 100, lambda: ": as it joined")
    evaluation.answered(ClientEvaluated(ClientId("b"), Version(7), {"loss": (40.0, 1e15)}), 100)
    assert evaluation.answers == {"a": sums | {"loss": ()}, "b": {"loss": ()}}
    assert evaluation.refused == {
        "a": "metric 'loss': a count of 1e+15 is above 100: as it joined",
        "b": "metric 'loss': a count of 1e+15 is above 100",
    }


def test_no_site_has_more_than_its_share_of_a_metric_and_the_reason_is_named():
    """A count of 10^15 beside 60 and 40: with half of the total at most it counts as 100."""
    it = answers(
        a={"accuracy": (1e15, 1e15), "f": (1e15, 0.0, 0.0), "loss": (5.0, 10.0)},
        b={"accuracy": (30.0, 60.0), "f": (10.0, 20.0, 30.0), "loss": (5.0, 10.0)},
        c={"accuracy": (10.0, 40.0), "f": (5.0, 5.0, 30.0), "loss": (5.0, 10.0)},
    )
    assert shown_sum(it)[0].capped == {}
    found, _ = shown_sum(replace(it, max_share=0.5))
    assert found.sums == {"accuracy": (140.0, 200.0), "f": (115.0, 25.0, 60.0), "loss": (15.0, 30.0)}
    assert found.capped == {
        "a": "metric 'accuracy': its weight 1e+15 counts as 100 (max_share 0.5); "
        "metric 'f': its weight 1e+15 counts as 100 (max_share 0.5)"
    }
    assert (found.num_clients, found.left_out) == (3, {})


def test_where_fewer_sites_answer_than_a_share_needs_all_count_alike():
    found, _ = shown_sum(replace(answers(a={"loss": (10.0, 10.0)}, b={"loss": (0.0, 90.0)}), max_share=0.25))
    assert found.sums == {"loss": (10.0, 20.0)}
