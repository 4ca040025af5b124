"""The metrics of an evaluation leave a site in a secure sum alone, whatever the coordinator asks."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from atoll.client.disk.spool import Spool
from atoll.client.policy.decide import Rule
from atoll.client.session.events import EvaluationRequest
from atoll.client.work.secure_sums import SecureSums
from atoll.protocol.secure import wire
from atoll.protocol.secure.messages import Gone, MaskedWords, MemberKeys, Roster
from atoll.protocol.secure.terms import Terms, ranges_digest
from atoll.protocol.secure.wire import SessionName
from atoll.protocol.vocabulary import Digest, RunId, Version
from atoll.server.folding.metric_sums import opened_metrics
from atoll.server.opening.streams import open_sum
from atoll.server.sessions.session import OpenSum, Session, Tell
from atoll.tensors.secure.masked_layout import layout_digest
from tests.client.site.sites import PINNED, Site, sites_of
from tests.server.sessions.small_federation import DIGEST, terms_of

METRICS = (("accuracy", 2), ("loss", 2))
SUMS = [{"loss": (1.5 * n, 10.0), "accuracy": (float(n), 10.0)} for n in range(1, 9)]


def terms_for(version: int = 3, **changes: Any) -> Terms:
    layout, ranges = layout_digest((), METRICS), ranges_digest(())
    given = {"round": version, "base": version, "algorithm": "", "layout": layout, "ranges": ranges, **changes}
    return terms_of(**{"purpose": "evaluation", "bits": 64, "metrics": METRICS, **given})


def request(terms: Terms | None, version: int = 3) -> EvaluationRequest:
    return EvaluationRequest(RunId("digits-1"), Version(version), "digits", Digest(DIGEST), 60.0, secure=terms)


class Shells:
    """The shells of sites, and a coordinator's session between them."""

    def __init__(self, root: Path, sites: list[Site]) -> None:
        self.root, self.sites = root, {site.name: site for site in sites}
        self.sent: dict[str, list[Any]] = {site.name: [] for site in sites}
        self.shells = {site.name: self.shell(site) for site in sites}

    def shell(self, site: Site) -> SecureSums:
        folder = self.root / f"spool-{site.name}"
        folder.mkdir(exist_ok=True)
        spool = Spool(folder, 2**20)
        stores: Any = SimpleNamespace(encoded=spool, spool=spool, models=None, work=self.root, noise_secret=b"")
        return SecureSums(
            site.name,
            stores,
            site.security,
            runner=None,  # metrics are masked in memory
            send=self.sent[site.name].append,
            spawn=asyncio.ensure_future,
            on_event=lambda event: None,
        )

    async def answers(self, act: Callable[[str], None], names: list[str] | None = None) -> dict[str, list[Any]]:
        """Return what each site sends after `act(name)`."""
        for sent in self.sent.values():
            sent.clear()
        for name in names or [*self.sites]:
            act(name)
        for _ in range(20):
            await asyncio.sleep(0)
        return {name: [wire.answer_of(message) for message in sent] for name, sent in self.sent.items() if sent}

    async def joined(self, asked: EvaluationRequest) -> dict[str, list[Any]]:
        """Return the sites' answers to a request whose evaluation has just ended."""
        each = dict(zip(self.sites, SUMS, strict=False))
        return await self.answers(lambda name: self.shells[name].join(asked, each[name]))

    async def asks(self, of: SessionName, tell: Tell, names: list[str]) -> Any:
        message = wire.question_message(of, tell.question, len(names))
        name = names[tell.position]
        found = await self.answers(lambda name: self.shells[name].asked(message), [name])
        return found[name][0]

    async def opened(self, asked: EvaluationRequest) -> dict[str, tuple[float, ...]]:
        """Return the sums of a whole session; `self.questions` are what the first site was asked."""
        assert asked.secure is not None
        terms, keys = asked.secure, await self.joined(asked)
        names = sorted(keys)
        roster = Roster(terms.threshold_of(len(names)), tuple(keys[name][0] for name in names))
        assert all(isinstance(member, MemberKeys) for member in roster.members)
        of = SessionName(RunId(terms.run), asked.version, terms.attempt, terms.session, terms.purpose)  # type: ignore[arg-type]
        session, masked, self.questions, self.of = Session(roster, terms.digest), {}, [], of
        waiting = session.start()
        while waiting:
            effect = waiting.pop(0)
            if isinstance(effect, OpenSum):
                found = open_sum(roster, session.id, session.masking, session.survivors, dict(effect.reveals))
                words = [masked[names[position]] for position in sorted(session.survivors)]
                return opened_metrics(words, [(s.key, s.sign) for s in found.streams], METRICS)
            assert isinstance(effect, Tell)
            self.questions += [effect] if effect.position == 0 else []
            answer = await self.asks(of, effect, names)
            if isinstance(answer, MaskedWords):
                masked[names[effect.position]] = answer.words
                waiting += session.masked(effect.position)
            else:
                waiting += session.answered(effect.position, answer)
        raise AssertionError("the session has not opened")


def run(root: Path, scenario: Callable[[Shells], Any], count: int = 4, policy: str = PINNED) -> Any:
    async def whole() -> Any:
        return await scenario(Shells(root, sites_of(root, count, policy)))

    return asyncio.run(whole())


def gone_of(found: dict[str, list[Any]]) -> set[str]:
    return {answer.reason for answers in found.values() for answer in answers if isinstance(answer, Gone)}


def test_the_sum_is_that_of_the_sites_metrics_and_no_message_has_a_single_one(tmp_path: Path) -> None:
    sums = run(tmp_path, lambda shells: shells.opened(request(terms_for())))
    assert sums == {"loss": (15.0, 40.0), "accuracy": (10.0, 40.0)}


def test_a_metric_that_the_terms_lack_or_that_is_too_large_is_left_out_with_a_line(tmp_path: Path, caplog: Any) -> None:
    async def scenario(shells: Shells) -> Any:
        joined = shells.shells["site-0"].join
        odd = {"loss": (2.0**37, 10.0), "accuracy": (1.0, 10.0), "f1": (1.0, 1.0)}
        shells.shells["site-0"].join = lambda asked, sums=None: joined(asked, odd)  # type: ignore[method-assign]
        return await shells.opened(request(terms_for()))

    assert run(tmp_path, scenario) == {"loss": (13.5, 30.0), "accuracy": (10.0, 40.0)}
    assert "metric 'loss' has a sum that is not within 6.87195e+10" in caplog.text
    assert "metric 'f1' is not in the terms of the sum" in caplog.text


def test_terms_of_other_work_are_refused(tmp_path: Path) -> None:
    for changes, said in (
        ({"round": 4}, "terms.round is 4; the request says 3"),
        ({"purpose": "update"}, "terms.purpose is 'update'; the request says 'evaluation'"),
        ({"base": 2}, "terms.base is 2; the request says 3"),
        ({"model": "cd" * 32}, "terms.model is"),
        ({"task": "other"}, "terms.task is 'other'; the request says 'digits'"),
        ({"local": '{"lr": 1}'}, "terms.local is"),
        ({"bits": 32}, "terms.bits is 32; the request says 64"),
        ({"layout": DIGEST}, "the terms of an evaluation are of tensors"),
    ):
        terms = terms_for(**changes)
        root = tmp_path / str(abs(hash(said)))
        reasons = gone_of(run(root, lambda shells, terms=terms: shells.joined(request(terms))))
        assert len(reasons) == 1
        assert said in reasons.pop()


def test_after_the_survivors_are_signed_no_other_sum_has_these_metrics(tmp_path: Path) -> None:
    async def scenario(shells: Shells) -> list[set[str]]:
        await shells.opened(request(terms_for()))
        found = [await shells.joined(request(terms_for(attempt=2)))]
        other = replace(request(terms_for(run="digits-2", round=3)), run_id=RunId("digits-2"))
        found.append(await shells.joined(other))  # the same model, in another run
        return [gone_of(each) for each in found]

    again, elsewhere = run(tmp_path, scenario)
    signed = "this site has signed the survivors of the evaluation of version 3: no other attempt of it is joined"
    assert again == {f"session_refused: {signed}"}
    [reason] = elsewhere
    assert "two sums of the same metrics over other sites" in reason


def test_another_attempt_before_that_adds_the_same_metrics_under_other_masks(tmp_path: Path) -> None:
    async def scenario(shells: Shells) -> Any:
        await shells.joined(request(terms_for()))
        shells.joined = lambda asked: shells.answers(lambda name: shells.shells[name].join(asked))  # type: ignore[method-assign]
        return await shells.opened(request(terms_for(attempt=2)))

    assert run(tmp_path, scenario) == {"loss": (15.0, 40.0), "accuracy": (10.0, 40.0)}


def test_a_repeated_question_gets_the_same_bytes_and_after_the_reveal_nothing_new(tmp_path: Path) -> None:
    async def scenario(shells: Shells) -> Any:
        await shells.opened(request(terms_for()))
        names = [*shells.sites]
        first = {type(tell.question).__name__: tell for tell in shells.questions}
        repeated = []
        for kind in ("Roster", "Boxes", "Survivors", "Opening"):
            message = wire.question_message(shells.of, first[kind].question, len(names))
            found = await shells.answers(lambda name, message=message: shells.shells[name].asked(message), names[:1])
            repeated.append([type(answer).__name__ for answers in found.values() for answer in answers])
        return repeated

    assert run(tmp_path, scenario) == [["SealedShares"], [], ["Agreement"], ["Reveal"]]


def test_a_restarted_agent_has_lost_its_session_and_evaluates_again_for_another_attempt(
    tmp_path: Path,
) -> None:
    async def scenario(shells: Shells) -> Any:
        await shells.joined(request(terms_for()))
        name = next(iter(shells.sites))
        shells.sites[name].start()
        shells.shells[name] = shells.shell(shells.sites[name])
        lost = await shells.answers(lambda name: shells.shells[name].join(request(terms_for()), SUMS[0]), [name])
        return gone_of(lost), await shells.opened(request(terms_for(attempt=2)))

    lost, sums = run(tmp_path, scenario)
    assert lost == {"session_lost: "}
    assert sums == {"loss": (15.0, 40.0), "accuracy": (10.0, 40.0)}


def test_a_site_s_least_number_of_sites_holds_for_the_members_of_its_sum(tmp_path: Path) -> None:
    policy = f"metrics_min_sites = 5\n{PINNED}"

    async def scenario(shells: Shells) -> Any:
        keys = await shells.joined(request(terms := terms_for()))
        roster = Roster(terms.threshold_of(4), tuple(keys[name][0] for name in sorted(keys)))
        of = SessionName(RunId(terms.run), 3, 1, 0, "evaluation")  # type: ignore[arg-type]
        return gone_of(
            await shells.answers(lambda name: shells.shells[name].asked(wire.question_message(of, roster, 4)))
        )

    assert run(tmp_path, scenario, policy=policy) == {
        "session_refused: the roster has 4 members; this site demands 5 (metrics_min_sites = 5)"
    }


def test_a_site_that_demands_sums_evaluates_in_them_alone(tmp_path: Path) -> None:
    site = Site(tmp_path, "north", f"{PINNED}required = true\n")
    plain = site.gate.ask(replace(request(None), local="{}"))
    assert (plain.rule, plain.detail) == (Rule.SECURE, "an evaluation outside of a secure sum: this site demands one")
    assert site.gate.ask(request(terms_for())).is_allowed
    site.demand(f'metrics = "none"\n{PINNED}')
    site.gate.poll(), site.gate.poll()
    assert site.gate.ask(request(terms_for())).rule is Rule.METRICS
