"""A run of secure rounds whose clients evaluate each version, in memory: the metrics are in secure sums, too."""

import hashlib
import random
from dataclasses import replace

from atoll.client.secure.member import KeepPromise, Mask, Send
from atoll.protocol.secure import wire
from atoll.protocol.secure.messages import Gone, MaskedWords, MemberKeys
from atoll.protocol.vocabulary import FailureReason, RoundId
from atoll.server.folding.metric_sums import opened_metrics
from atoll.server.journal.codec import decode_event, encode_event
from atoll.server.opening.streams import NotOpened
from atoll.server.rounds import events as ev
from atoll.server.rounds import session_events as of_sessions
from atoll.server.rounds.run_machine import RunMachine
from atoll.tensors.masked.metrics import encode_metrics, mask_metrics
from tests.server.rounds.secure_federation import KIND, SecureRun
from tests.server.sessions.small_federation import terms_of

METRICS = (("accuracy", 2), ("loss", 2))


def metrics_of(name: str, version: int) -> dict[str, tuple[float, ...]]:
    """Return what a site measures: sums that words of 2^-20 hold exactly."""
    draw = random.Random(f"{name} {version}")
    count = draw.randint(1, 50)
    return {"loss": (draw.randint(-4000, 4000) / 256, count), "accuracy": (draw.randint(0, count), count)}


class Evaluation:
    """What a site has for an evaluation: its encoded metrics, and the member of the newest attempt."""

    def __init__(self, name, version):
        self.encoded = encode_metrics(metrics_of(name, version), METRICS)[0]
        self.members, self.lost, self.masked = {}, set(), {}


class EvaluatedRun(SecureRun):
    """A run of secure rounds with evaluations by clients."""

    def __init__(self, count, draw, *, most=0, **settings):
        super().__init__(count, draw, **settings)
        self.rules = replace(self.rules, evaluate_clients_every=1, evaluate_clients_max=most)
        self.machine = RunMachine(self.rules)
        self.evaluations: dict[tuple[str, int], Evaluation] = {}
        self.closed: list[ev.CloseEvaluation] = []
        self.told = []  # kinds of the messages for evaluations, in order of arrival
        self.attempts = set()  # of which keys have come

    # ------------------------------------------------------------ the coordinator

    def carry_out(self, effect):
        match effect:
            case ev.AskEvaluation():
                self.send(effect)
            case of_sessions.OpenSum(purpose="evaluation"):
                self.queue.append(lambda: self.open_metrics(effect))
            case ev.CloseEvaluation():
                self.check(effect)
                self.forget_evaluation()
            case _:
                super().carry_out(effect)

    def open_metrics(self, effect):
        summed = effect.sum
        at = (effect.round_id, summed.session, summed.attempt)
        try:
            streams, wrong = self.streams_of(summed)
        except NotOpened as error:
            self.post(of_sessions.OpeningFailed(*at, str(error), "evaluation"))
            return
        sums = opened_metrics(effect.words, [(stream.key, stream.sign) for stream in streams], METRICS)
        self.post(of_sessions.SumOpened(*at, tuple(wrong), "evaluation", sums))

    def check(self, closed):
        """Check that the sums are those of the members, and that nothing of a single one is there."""
        self.closed.append(closed)
        assert not closed.answers
        assert {*closed.summed} | {*closed.failures} == {*closed.summed} ^ {*closed.failures}
        if not closed.summed:
            assert closed.sums is None
            return
        assert len(closed.summed) >= 3
        each = [metrics_of(name, closed.version) for name in closed.summed]
        expected = {name: tuple(map(sum, zip(*(one[name] for one in each), strict=True))) for name, _ in METRICS}
        assert closed.sums == expected

    def forget_evaluation(self):
        """Delete what opened the sums, as the journal does at the end of an evaluation."""
        for place, (at, kind, body) in enumerate(self.journal):
            if kind in ("SharesRevealed", "MaskedCame"):
                event = decode_event(kind, body, where="")
                if event.purpose == "evaluation":
                    self.journal[place] = (at, *encode_event(replace(event, content="")))

    # ------------------------------------------------------------ the sites

    def at_site(self, effect):
        if not (isinstance(effect, ev.AskEvaluation) or getattr(effect, "purpose", "update") == "evaluation"):
            super().at_site(effect)
            return
        name = effect.client_id
        if name not in self.connected:
            return
        if self.draw.random() < self.faults:
            self.fail(name)
            return
        if isinstance(effect, ev.AskEvaluation):
            self.evaluate(name, effect.version, effect.sum)
            return
        at = (name, int(effect.round_id), effect.session, effect.attempt)
        work = self.evaluations.get(at[:2])
        member = work.members.get(at[2:]) if work is not None else None
        if member is None:
            self.say_of_evaluation(*at, Gone("session_lost: it was restarted"))
            return
        message = wire.question_message(self.name_of(*at[1:]), effect.question, effect.members)
        self.done(*at, member.ask(wire.question_of(message, member.num_members)))

    def evaluate(self, name, version, place):
        work = self.evaluations.setdefault((name, version), Evaluation(name, version))
        key = (place.session, place.attempt)
        if key in work.lost:
            self.say_of_evaluation(name, version, *key, Gone("session_lost: it was restarted"))
            return
        if (member := work.members.get(key)) is None:
            model = hashlib.sha256(f"model {version}".encode()).hexdigest()
            terms = terms_of(
                purpose="evaluation",
                round=version,
                attempt=place.attempt,
                session=place.session,
                base=version,
                model=model,
                bits=64,
                metrics=METRICS,
            )
            member = work.members[key] = self.sites[name].member(terms)
        self.done(name, version, *key, member.start())

    def done(self, name, version, session, attempt, effects):
        site, work = self.sites[name], self.evaluations[name, version]
        for effect in effects:
            match effect:
                case KeepPromise(promise):
                    site.keep(promise)
                case Mask(streams):
                    pairs = [(stream.key, stream.sign) for stream in streams]
                    words = mask_metrics(work.encoded, pairs)
                    assert work.masked.setdefault((session, attempt), words) == words
                    self.say_of_evaluation(name, version, session, attempt, MaskedWords(words))
                case Send(message):
                    self.say_of_evaluation(name, version, session, attempt, message)

    def name_of(self, version, session, attempt):
        return wire.SessionName("digits-1", version, attempt, session, "evaluation")

    def say_of_evaluation(self, name, version, session, attempt, message):
        at = (name, RoundId(version), session, attempt)
        if isinstance(message, Gone):
            message = wire.answer_of(wire.answer_message(self.name_of(version, session, attempt), message))
            reason, _, detail = message.reason.partition(": ")
            self.reasons.append(message.reason)
            known = FailureReason(reason) if reason in set(FailureReason) else FailureReason.SESSION_REFUSED
            event = of_sessions.SessionLeft(*at, known, detail, message.refused, "evaluation")
        else:
            kinds = {MemberKeys: of_sessions.KeysCame, MaskedWords: of_sessions.MaskedCame, **KIND}
            sent = wire.answer_message(self.name_of(version, session, attempt), message)
            event = kinds[type(message)](*at, wire.encoded(sent).hex(), "evaluation")
        self.queue.append(lambda: self.heard_of_evaluation(name, event))
        if self.draw.random() < self.faults:
            self.queue.append(lambda: self.heard_of_evaluation(name, event))

    def heard_of_evaluation(self, name, event):
        sums = self.machine.sums_of_evaluation
        if name in self.connected and sums is not None and sums.is_news_of(event):
            self.told.append(type(event).__name__)
            self.attempts |= {event.attempt} if isinstance(event, of_sessions.KeysCame) else set()
            self.post(event)

    def fail(self, name):
        before = self.connected.copy()
        for (site, _), work in self.evaluations.items():
            if site == name:
                work.lost |= work.members.keys()
                work.members.clear()
        super().fail(name)
        assert before - self.connected == {name}
