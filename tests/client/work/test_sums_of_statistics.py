"""Statistics leave a site that demands secure sums in one alone, over one set of sites for each task."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from atoll.client.policy.decide import Rule
from atoll.client.session.events import StatisticsRequest
from atoll.protocol.secure import wire
from atoll.protocol.secure.messages import Gone, MaskedWords, MemberKeys, Roster
from atoll.protocol.secure.terms import Terms, data_digest, ranges_digest
from atoll.protocol.secure.wire import SessionName
from atoll.protocol.vocabulary import RoundId, RunId
from atoll.server.opening.streams import open_sum
from atoll.server.sessions.session import Fail, OpenSum, Session, Tell
from atoll.tensors.masked.whole_numbers import opened_numbers
from atoll.training.statistics.parts import Histogram, Moments, SiteStatistics, count
from atoll.training.statistics.question import Question, summed_parts
from tests.client.site.sites import PINNED, Site, sites_of
from tests.client.work.test_sums_of_metrics import Shells, gone_of
from tests.server.sessions.small_federation import DIGEST, terms_of

QUESTION = Question(("train",), (("target", 2),), features=(("age", (0.0, 100.0)),))
ALLOWS = f'statistics = "merged"\nstatistics_min_count = 1\n{PINNED}'


def statistics_of(number: int) -> SiteStatistics:
    ages = [Fraction(10 * number), Fraction(20)]
    return SiteStatistics(
        {
            ("train", "examples", ""): count(2),
            ("train", "labels", "target"): Histogram({"0": 1, "1": 1}),
            ("train", "features", "age"): Moments(
                2, 0, 0, sum(ages, Fraction()), sum((a * a for a in ages), Fraction())
            ),
            ("train", "feature_bins", "age"): Histogram({"0": 2}),
        }
    )


def terms_for(number: int = 5, question: Question = QUESTION, **changes: Any) -> Terms:
    given = {"round": number, "algorithm": "", "layout": question.digest, "ranges": ranges_digest(()), "bits": 64}
    model = data_digest(str(changes.get("task", "digits")))
    return terms_of(**{"run": "digits-statistics", "purpose": "statistics", "model": model, **given, **changes})


def request(terms: Terms | None, question: Question = QUESTION, number: int = 0) -> StatisticsRequest:
    number = number or (terms.round if terms is not None else 5)
    run = RunId(terms.run if terms is not None else "digits-statistics")
    return StatisticsRequest(run, number, "digits", 60.0, secure=terms, question=None if terms is None else question)


class Sites(Shells):
    """The shells of sites, and a coordinator's session of statistics between them."""

    async def keys(self, asked: StatisticsRequest, names: list[str] | None = None) -> dict[str, list[Any]]:
        """Return the answers of sites whose statistics have just been made."""
        each = {name: statistics_of(place) for place, name in enumerate(self.sites)}
        return await self.answers(lambda name: self.shells[name].join(asked, each[name]), names)

    async def summed(
        self, asked: StatisticsRequest, names: list[str] | None = None, silent: tuple[str, ...] = (), lost: str = ""
    ) -> Any:
        """Return the names and the numbers of a sum, or the reasons for none.

        Args:
            asked: the request.
            names: the members; None: all sites.
            silent: members that send shares, and whose masked words do not arrive.
            lost: a member whose shares do not arrive.
        """
        keys = await self.keys(asked, names)
        assert asked.secure is not None
        assert asked.question is not None
        if reasons := gone_of(keys):
            return reasons
        terms, names = asked.secure, sorted(keys)
        roster = Roster(terms.threshold_of(len(names)), tuple(keys[name][0] for name in names))
        assert all(isinstance(member, MemberKeys) for member in roster.members)
        at = (RunId(terms.run), RoundId(terms.round), terms.attempt, terms.session, terms.purpose)
        of, session, masked = SessionName(*at), Session(roster, terms.digest), {}
        self.reasons: set[str] = set()
        waiting = session.start()
        while waiting or not session.is_over:
            if not waiting:
                waiting += session.due()
                continue
            effect = waiting.pop(0)
            if isinstance(effect, Fail):
                return self.reasons
            if isinstance(effect, OpenSum):
                found = open_sum(roster, session.id, session.masking, session.survivors, dict(effect.reveals))
                words = [masked[names[position]] for position in sorted(session.survivors)]
                streams = [(stream.key, stream.sign) for stream in found.streams]
                numbers = opened_numbers(words, streams, asked.question.num_numbers)
                return [names[position] for position in sorted(session.survivors)], numbers
            assert isinstance(effect, Tell)
            name, answer = names[effect.position], await self.asks(of, effect, names)
            if isinstance(answer, MaskedWords):
                if name not in silent:
                    masked[name] = answer.words
                    waiting += session.masked(effect.position)
            elif isinstance(answer, Gone):
                self.reasons.add(answer.reason)
                waiting += session.left(effect.position, answer.reason)
            elif not (name == lost and session.stage == "sharing"):
                waiting += session.answered(effect.position, answer)
        raise AssertionError("the session has no end")


def run(root: Path, scenario: Callable[[Sites], Any], number: int = 5, policy: str = ALLOWS) -> Any:
    async def whole() -> Any:
        return await scenario(Sites(root, sites_of(root, number, policy)))

    return asyncio.run(whole())


OTHER_SET = "this site has signed statistics of digits over 1 set of sites, and this sum would be over another"


def test_the_sum_is_that_of_the_sites_statistics(tmp_path: Path) -> None:
    names, numbers = run(tmp_path, lambda sites: sites.summed(request(terms_for())))
    assert names == [f"site-{place}" for place in range(5)]
    parts = summed_parts(numbers, QUESTION, 5)
    age, given = parts["train", "features", "age"]
    assert isinstance(age, Moments)
    assert (age.count, age.mean, given) == (10, (100 + 100) / 10, 5)
    assert age.squares == sum(100 * n * n + 400 for n in range(5))
    cells, _ = parts["train", "labels", "target"]
    assert isinstance(cells, Histogram)
    assert cells.cells == {"0": 5, "1": 5, "other": 0}


def test_one_that_drops_out_is_not_in_the_sum(tmp_path: Path) -> None:
    names, numbers = run(tmp_path, lambda sites: sites.summed(request(terms_for()), silent=("site-2",)))
    assert names == ["site-0", "site-1", "site-3", "site-4"]
    assert summed_parts(numbers, QUESTION, 4)["train", "examples", ""][0] == count(8)


def test_terms_of_another_request_are_refused(tmp_path: Path) -> None:
    other = replace(QUESTION, features=(("age", (0.0, 50.0)),))
    for number, (changes, said) in enumerate(
        (
            ({"number": 6}, "terms.round is 6; the request says 5"),
            ({"purpose": "evaluation"}, "terms.purpose is 'evaluation'; the request says 'statistics'"),
            ({"model": DIGEST}, "terms.model is"),
            ({"base": 1}, "terms.base is 1"),
            ({"local": '{"lr": 1}'}, "terms.local is"),
            ({"bits": 32}, "terms.bits is 32"),
            ({"question": other}, "terms.layout is"),
            ({"metrics": (("loss", 2),)}, "terms.metrics is"),
            ({"run": "digits-1"}, "terms.run is"),
        )
    ):
        terms = terms_for(**changes)
        asked = replace(request(terms, number=5), run_id=RunId("digits-statistics"))
        [reason] = gone_of(run(tmp_path / str(number), lambda sites, asked=asked: sites.keys(asked), 3))
        assert said in reason


def test_a_later_sum_of_the_task_is_over_the_same_sites_or_over_none(tmp_path: Path) -> None:
    async def scenario(sites: Sites) -> list[Any]:
        other = replace(QUESTION, labels=(), features=(("age", (0.0, 50.0, 100.0)),))
        all_but_one = [*sites.sites][:4]
        return [
            await sites.summed(request(terms_for(5))),
            await sites.summed(request(terms_for(6)), all_but_one),
            await sites.summed(request(terms_for(7, other), other), all_but_one),
            await sites.summed(request(terms_for(8, run="elsewhere-statistics")), all_but_one),
            await sites.summed(request(terms_for(9)), lost="site-3"),
            await sites.summed(request(terms_for(10)), silent=("site-3",)),
            await sites.summed(request(terms_for(11))),
        ]

    first, *refused, again = run(tmp_path, scenario)
    assert len(first[0]) == 5
    for reasons in refused:
        assert all(OTHER_SET in reason for reason in reasons)
        assert reasons
    assert again == first


def test_the_order_of_requests_holds_for_all_runs_and_after_a_restart(tmp_path: Path) -> None:
    async def scenario(sites: Sites) -> list[Any]:
        found = [await sites.keys(request(terms_for(7)))]
        for name, site in sites.sites.items():
            site.start()
            sites.shells[name] = sites.shell(site)
        for number, run in ((7, "digits-statistics"), (7, "other"), (6, "other")):
            found.append(await sites.keys(request(terms_for(number, run=run))))
        return [gone_of(each) for each in found]

    joined, lost, same, older = run(tmp_path, scenario, 3)
    assert not joined
    assert lost == {"session_lost: "}
    for number, reasons in ((7, same), (6, older)):
        [reason] = reasons
        assert reason.startswith(
            f"session_refused: statistics {number}, attempt 1 is not above the newest that this site has joined: "
            "statistics 7"
        )


def test_a_sum_is_not_signed_after_a_later_one_was_joined(tmp_path: Path) -> None:
    """Both sums would be opened by other halves of the sites, and differ by one site."""

    async def scenario(sites: Sites) -> Any:
        later = request(terms_for(6, run="other"))
        ask = sites.asks

        async def asks(of: SessionName, tell: Tell, names: list[str]) -> Any:
            if type(tell.question).__name__ == "Survivors" and of.round == 5:
                await sites.keys(later, [names[tell.position]])
            return await ask(of, tell, names)

        sites.asks = asks  # type: ignore[method-assign]
        return await sites.summed(request(terms_for(5)))

    [reason] = run(tmp_path, scenario)
    assert "this site has joined a later one: request 6 for statistics of this task, attempt 1" in reason


def test_statistics_of_another_task_are_of_other_sites(tmp_path: Path) -> None:
    async def scenario(sites: Sites) -> list[Any]:
        first = await sites.summed(request(terms_for(5)))
        other = replace(request(terms_for(6, task="letters")), task="letters")
        return [first, await sites.summed(other, [*sites.sites][:4])]

    first, second = run(tmp_path, scenario)
    assert (len(first[0]), len(second[0])) == (5, 4)


def test_a_site_masks_nothing_for_other_sites_than_those_that_it_has_signed(tmp_path: Path) -> None:
    async def scenario(sites: Sites) -> Any:
        await sites.summed(request(terms_for(5)))
        asked, masked = sites.asks, []

        async def asks(of: SessionName, tell: Tell, names: list[str]) -> Any:
            masked.append(isinstance(answer := await asked(of, tell, names), MaskedWords))
            return answer

        sites.asks = asks  # type: ignore[method-assign]
        return await sites.summed(request(terms_for(6)), [*sites.sites][:4]), {*masked}

    _, masked = run(tmp_path, scenario)
    assert masked == {False}


def test_small_counts_of_a_site_are_in_no_sum(tmp_path: Path) -> None:
    policy = f'statistics = "merged"\nstatistics_min_count = 2\n{PINNED}'
    _, numbers = run(tmp_path, lambda sites: sites.summed(request(terms_for())), policy=policy)
    parts = summed_parts(numbers, QUESTION, 5)
    assert parts["train", "features", "age"][1] == 5
    labels, _ = parts["train", "labels", "target"]
    assert isinstance(labels, Histogram)
    assert labels == Histogram({"0": 0, "1": 0, "other": 0}, 10), "each site has one of each label"


def test_a_policy_may_allow_another_set_of_sites(tmp_path: Path) -> None:
    async def scenario(sites: Sites) -> list[Any]:
        four = [*sites.sites][:4]
        return [
            await sites.summed(request(terms_for(5))),
            await sites.summed(request(terms_for(6)), four),
            await sites.summed(request(terms_for(7)), [*sites.sites][1:]),
        ]

    first, second, third = run(tmp_path, scenario, policy=f"{ALLOWS}statistics_sets_max = 2\n")
    assert (len(first[0]), len(second[0])) == (5, 4)
    assert any("over 2 sets of sites" in reason for reason in third)


def test_a_least_number_of_sites_and_none_at_all_hold_for_the_sum(tmp_path: Path) -> None:
    few = run(
        tmp_path / "a", lambda sites: sites.summed(request(terms_for())), policy=f"statistics_min_sites = 6\n{ALLOWS}"
    )
    assert few == {"session_refused: the roster has 5 members; this site demands 6 (statistics_min_sites = 6)"}
    none = run(tmp_path / "b", lambda sites: sites.summed(request(terms_for())), policy=PINNED)
    assert none == {"session_refused: no statistics leave this site"}


def test_a_site_whose_data_has_another_layout_declines_and_its_values_are_not_told(tmp_path: Path) -> None:
    weight = replace(QUESTION, features=(("weight", (0.0, 1.0)),))
    asked = request(terms_for(question=weight), weight)
    assert run(tmp_path, lambda sites: sites.summed(asked)) == {
        "session_refused: this site's train data has no feature 'weight'"
    }


def test_a_site_that_demands_sums_gives_statistics_in_them_alone(tmp_path: Path) -> None:
    site = Site(tmp_path, "north", f"{ALLOWS}required = true\n")
    plain = site.gate.ask(request(None))
    assert (plain.rule, plain.detail) == (
        Rule.SECURE,
        "statistics of the data outside of a secure sum: this site demands one",
    )
    assert site.gate.ask(request(terms_for())).is_allowed
    site.demand(f'statistics = "none"\n{PINNED}')
    site.gate.poll(), site.gate.poll()
    assert site.gate.ask(request(terms_for())).rule is Rule.STATISTICS


def test_a_policy_that_changes_ends_the_session(tmp_path: Path) -> None:
    async def scenario(sites: Sites) -> set[str]:
        await sites.keys(request(terms_for()))
        for site in sites.sites.values():
            site.demand(PINNED)
            site.gate.poll(), site.gate.poll()
        found = await sites.answers(lambda name: sites.shells[name].policy_changed())
        return gone_of(found)

    assert run(tmp_path, scenario, 3) == {"session_refused: no statistics leave this site"}


def test_a_repeated_question_gets_the_same_bytes(tmp_path: Path) -> None:
    async def scenario(sites: Sites) -> Any:
        asked, told = sites.asks, []

        async def asks(of: SessionName, tell: Tell, names: list[str]) -> Any:
            first = await asked(of, tell, names)
            message = wire.question_message(of, tell.question, len(names))
            name = names[tell.position]
            again = await sites.answers(lambda name: sites.shells[name].asked(message), [name])
            told.append(not again or again[name] == [first])
            return first

        sites.asks = asks  # type: ignore[method-assign]
        names, _ = await sites.summed(request(terms_for()))
        return len(names), {*told}

    assert run(tmp_path, scenario, 3) == (3, {True})
