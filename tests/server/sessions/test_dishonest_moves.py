"""Dishonest moves of a coordinator and of members, each in 20 sessions of random sizes, victims and accomplices.

The numbers are those of the list of moves. A move of the coordinator ends at its victim with the reason, before any
secret leaves; `test_lies` has the edges of each check, `test_lying_servers` all moves in any combination.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from atoll.client.secure.member import Mask, Send
from atoll.client.secure.promises import Promises
from atoll.protocol.secure import wire
from atoll.protocol.secure.messages import (
    Agreement,
    Boxes,
    Gone,
    MemberKeys,
    Opening,
    Reveal,
    Roster,
    SealedShares,
    Survivors,
    survivors_statement,
)
from atoll.protocol.secure.shamir import PRIME
from atoll.server.opening.streams import NotOpened, open_sum
from atoll.server.sessions.session import Fail, OpenSum, Session, Stage, Tell
from atoll.tensors.secure.keystream import add_stream
from tests.server.sessions.small_federation import (
    SIZE,
    Site,
    masked_in_parts,
    privacy_of,
    sites_of,
    terms_of,
    vectors_of,
)
from tests.server.sessions.test_lies import LOW_ORDER, Honest

SEEDS = range(20)


class Told(Honest):
    """Sites in a session, of which one is told something else."""

    def __init__(self, seed: int, **rules) -> None:
        self.draw = random.Random(f"move {seed}")
        count = rules.pop("count", None) or self.draw.randint(4, 8)
        super().__init__(count, **rules)
        self.victim, self.other, self.third = self.draw.sample(range(count), 3)

    @property
    def size(self) -> int:
        return len(self.members)

    def name(self, number: int) -> str:
        return f"site-{number:02d}"

    def outcome(self, question) -> str:
        """Tell the victim, and return why it leaves; nothing secret is left in its memory."""
        gone = self.ask(question, self.victim)
        assert isinstance(gone, Gone), gone
        assert self.members[self.victim]._secrets is None
        return gone.reason

    def roster_with(self, number: int, **fields) -> Roster:
        """Return the roster with other fields in a member's keys, under its old signature."""
        members = [*self.roster.members]
        members[number] = replace(members[number], **fields)
        return replace(self.roster, members=tuple(members))

    def boxes(self) -> dict[int, bytes]:
        """All share; return the victim's boxes."""
        return {**self.shared()[self.victim].boxes}

    def all_but(self, *without: int) -> frozenset[int]:
        return frozenset(range(self.size)) - {*without}

    def quorum(self) -> dict[int, bytes]:
        """All agree to all; return their signatures."""
        return self.agreed()


def _public() -> bytes:
    return X25519PrivateKey.generate().public_key().public_bytes_raw()


def _stranger(it: Told) -> Roster:
    [_, send] = Site("site-99").member(it.terms).start()
    return replace(it.roster, members=(*it.roster.members[:-1], send.message))


def _other_key(it: Told) -> Roster:
    key = Ed25519PrivateKey.generate()
    keys = replace(it.keys[it.other], site=replace(it.keys[it.other].site, key=key.public_key().public_bytes_raw()))
    members = [*it.roster.members]
    members[it.other] = replace(keys, signature=key.sign(keys.statement()))
    return replace(it.roster, members=tuple(members))


def _resigned(it: Told, **fields) -> Roster:
    keys = replace(it.keys[it.other], **fields)
    signed = replace(keys, signature=it.sites[it.other].key.sign(keys.statement()))
    members = [*it.roster.members]
    members[it.other] = signed
    return replace(it.roster, members=tuple(members))


OTHER_TERMS = {
    **{"model": "cd" * 32, "clip_norm": 2.0, "bits": 64, "examples_max": 1, "ranges": "cd" * 32, "layout": "cd" * 32},
    **{
        "frozen": "cd" * 32,
        "task": "other",
        "local": '{"lr":1}',
        "algorithm": "scaffold",
        "privacy": privacy_of().text(),
    },
    **{"receivers": (0,), "members_max": 63, "threshold": "4", "session": 1, "round": 2, "base": 1, "run": "other"},
}

ROSTERS = {
    1: lambda it: (it.roster_with(it.other, mask_key=_public()), f"the signature of {it.name(it.other)} is wrong"),
    2: lambda it: (
        it.roster_with(it.other, signature=Ed25519PrivateKey.generate().sign(it.keys[it.other].statement())),
        f"the signature of {it.name(it.other)} is wrong",
    ),
    3: lambda it: (_other_key(it), f"the key of {it.name(it.other)} is not pinned"),
    4: lambda it: (_stranger(it), "is not pinned" if it.victim < it.size - 1 else "the keys that this site has sent"),
    **{
        f"6, 7, 39 {name}": lambda it, name=name: (
            _resigned(it, terms=terms_of(**{name: OTHER_TERMS[name]}).digest),
            f"{it.name(it.other)} has other terms",
        )
        for name in OTHER_TERMS
    },
    8: lambda it: (replace(it.roster, threshold=it.roster.threshold - 1), "the terms give"),
    9: lambda it: (replace(it.roster, threshold=it.roster.threshold + 1), "the terms give"),
    16: lambda it: (
        replace(it.roster, members=(*it.roster.members[:1], *it.roster.members[:-1])),
        "not sorted and unique",
    ),
    21: lambda it: (
        _resigned(it, **{it.draw.choice(["mask_key", "box_key"]): LOW_ORDER}),
        f"a key of {it.name(it.other)} is none",
    ),
    22: lambda it: (
        _resigned(it, **{(kind := it.draw.choice(["mask_key", "box_key"])): getattr(it.keys[it.third], kind)}),
        "two members of the roster have one",
    ),
    "48 keys of another attempt": lambda it: (
        replace(it.roster, members=tuple(sorted((_earlier(it), *_without(it)), key=lambda each: each.name))),
        f"{it.name(it.other)} has other terms",
    ),
}


def _earlier(it: Told) -> MemberKeys:
    """Return what a member has signed for another attempt."""
    effects = it.sites[it.other].member(terms_of(attempt=2)).start()
    return next(effect.message for effect in effects if isinstance(effect, Send))


def _without(it: Told) -> list[MemberKeys]:
    return [keys for number, keys in enumerate(it.keys) if number != it.other]


@pytest.mark.parametrize("move", ROSTERS, ids=str)
def test_a_false_roster(move):
    for seed in SEEDS:
        it = Told(seed)
        roster, reason = ROSTERS[move](it)
        assert reason in it.outcome(roster)


def _box_of(it: Told, place: int, content: bytes) -> dict[int, bytes]:
    return {**it.boxes(), place: content}


def _swapped(it: Told) -> dict[int, bytes]:
    boxes = it.boxes()
    return {**boxes, it.other: boxes[it.third], it.third: boxes[it.other]}


def _for_another(it: Told) -> dict[int, bytes]:
    shared = it.shared()
    return {**shared[it.victim].boxes, it.other: shared[it.third].boxes[it.other]}


def _of_another_session(it: Told) -> dict[int, bytes]:
    again = Honest.over(it.sites, terms_of(round=2))
    return {**it.boxes(), it.other: again.shared()[it.victim].boxes[it.other]}


WRONG_BOX = "it was sealed with another key, or changed"
BOXES = {
    13: lambda it: ({**it.boxes(), it.victim: bytes(82)}, "a box from this site itself"),
    14: lambda it: (
        dict(list(it.boxes().items())[: it.roster.threshold - 2]),
        "members send shares; this site demands",
    ),
    15: lambda it: ({**it.boxes(), it.size: bytes(82)}, "none of those before"),
    17: lambda it: (_for_another(it), WRONG_BOX),
    18: lambda it: (_of_another_session(it), WRONG_BOX),
    19: lambda it: (_swapped(it), WRONG_BOX),
    20: lambda it: (_box_of(it, it.other, it.boxes()[it.other][: it.draw.randrange(82)]), WRONG_BOX),
}


@pytest.mark.parametrize("move", BOXES)
def test_false_boxes(move):
    for seed in SEEDS:
        it = Told(seed)
        boxes, reason = BOXES[move](it)
        assert reason in it.outcome(Boxes(boxes))


SETS = {
    23: lambda it: ({*it.all_but(it.other), it.size}, "none of those before"),
    24: lambda it: (it.all_but(it.victim), "this site is not among the members that survive"),
    25: lambda it: (
        {it.victim, *sorted(it.all_but(it.victim))[: it.roster.threshold - 2]},
        "this site demands",
    ),
}


@pytest.mark.parametrize("move", SETS)
def test_false_survivors(move):
    for seed in SEEDS:
        it = Told(seed)
        it.masked()
        survivors, reason = SETS[move](it)
        assert reason in it.outcome(Survivors(frozenset(survivors)))
        assert not [promise for promise in it.sites[it.victim].written if promise.kind == "signed"]


def test_sums_of_too_few_for_their_noise():  # 60: h + n_c members have it, whoever withholds a share
    for seed in SEEDS:
        count = random.Random(f"noise {seed}").randint(6, 9)
        threshold = 2 * count // 3 + 1
        told = random.Random(seed).choice(["boxes", "survivors"])
        it = Told(seed, count=count, terms=terms_of(privacy=privacy_of(threshold, 1).text()))
        few = {it.victim, *sorted(it.all_but(it.victim))[: threshold - 1]}  # t of them, and h + n_c is t + 1
        if told == "boxes":
            boxes = it.boxes()
            lie = Boxes({sender: box for sender, box in boxes.items() if sender in few})
        else:
            it.masked()
            lie = Survivors(frozenset(few))
        assert f"the noise of {threshold} honest members" in it.outcome(lie)
        assert not [promise for promise in it.sites[it.victim].written if promise.kind == "signed"]


def test_two_questions_of_one_kind():  # 11, 26, 33
    for seed in SEEDS:
        it = Told(seed, count=7)
        signatures, quorum = it.quorum(), it.roster.threshold
        kind = it.draw.choice([Roster, Boxes, Survivors, Opening])
        if kind is Opening:
            assert isinstance(it.ask(Opening(signatures), it.victim), Reveal)
        other = {
            Roster: lambda it=it: replace(it.roster, members=it.roster.members[:-1]),
            Boxes: lambda it=it: Boxes({}),
            Survivors: lambda it=it: Survivors(it.all_but(it.other)),
            Opening: lambda it=it, s=signatures, q=quorum: Opening(dict([*s.items()][:q])),
        }[kind]()
        assert it.outcome(other) == f"the coordinator has sent two different {kind.__name__} in one session"


def _dead(it: Told) -> tuple[dict[int, bytes], str]:
    """A member that is no survivor agrees."""
    signatures = it.agreed(it.all_but(it.other))
    statement = survivors_statement(it.members[it.victim]._session, it.all_but(it.other), it.size)
    return {
        **signatures,
        it.other: it.sites[it.other].key.sign(statement),
    }, "an agreement of a member that is no survivor"


def _over_another_set(it: Told) -> tuple[dict[int, bytes], str]:
    signatures = it.agreed()
    statement = survivors_statement(it.members[it.victim]._session, it.all_but(it.third), it.size)
    return {**signatures, it.other: it.sites[it.other].key.sign(statement)}, "is to other survivors"


OPENINGS = {
    27: lambda it: (dict([*it.quorum().items()][: it.roster.threshold - 1]), "agreements; needed:"),
    28: _dead,
    29: _over_another_set,
    30: lambda it: (dict.fromkeys(range(it.size), it.quorum()[it.other]), "is to other survivors"),
}


@pytest.mark.parametrize("move", OPENINGS)
def test_false_openings(move):
    for seed in SEEDS:
        it = Told(seed, count=random.Random(seed).randint(6, 9))  # one member fewer is still a quorum
        signatures, reason = OPENINGS[move](it)
        assert reason in it.outcome(Opening(signatures))


def test_openings_and_sets_out_of_turn():  # 31
    for seed in SEEDS:
        it = Told(seed)
        question = it.draw.choice([Boxes({}), Survivors(it.all_but()), Opening({})])
        assert it.outcome(question) == f"{type(question).__name__} in the stage keys"


def test_a_repeated_question_gets_the_same_bytes():  # 32, 35
    for seed in SEEDS:
        it = Told(seed)
        signatures = it.quorum()
        question = Opening(signatures)
        first = wire.answer_message(NAME, it.ask(question, it.victim)).SerializeToString()
        for _ in range(3):
            assert wire.answer_message(NAME, it.ask(question, it.victim)).SerializeToString() == first


def test_what_is_masked_again_has_the_same_bytes():  # 35
    for seed in SEEDS:
        it = Told(seed)
        boxes, encoded = Boxes(it.boxes()), np.arange(SIZE, dtype=np.uint32)
        first, again = (it.members[it.victim].ask(boxes)[0] for _ in range(2))
        assert isinstance(first, Mask)
        cuts = sorted(it.draw.sample(range(1, SIZE), 3))
        assert np.array_equal(masked_in_parts(encoded, first.streams), masked_in_parts(encoded, again.streams, cuts))


NAME = wire.SessionName("digits-1", 1, 1, 0)


def test_no_message_has_room_for_both_shares():  # 34
    for seed in SEEDS:
        it = Told(seed)
        reveal = it.ask(Opening(it.quorum()), it.victim)
        message = wire.answer_message(NAME, reveal)
        assert len(message.secure_reveal.shares) == it.size
        both = [share + share for share in message.secure_reveal.shares]
        message.secure_reveal.shares[:] = both
        with pytest.raises(wire.BadForm):
            wire.answer_of(message)
        message.secure_reveal.shares[:] = [share for pair in both for share in (pair[:33], pair[33:])]
        twice = wire.answer_of(message)
        session = _opening(it)
        session.answered(it.victim, twice)
        assert session.gone[it.victim] == f"its reveal is not {it.size} shares"


def _opening(it: Told) -> Session:
    """Return the coordinator's session in the stage in which it takes reveals."""
    session = Session(it.roster, it.terms.digest)
    session.start()
    for number, member in enumerate(it.members):
        session.answered(number, member._answers[Roster][1][0].message)
    for number in range(it.size):
        session.masked(number)
    for number, member in enumerate(it.members):
        session.answered(number, next(e.message for e in member._answers[Survivors][1] if isinstance(e, Send)))
    assert session.stage is Stage.OPENING
    return session


@pytest.mark.parametrize("signed", [False, True])
def test_lower_equal_and_later_attempts_after_kill_9(signed):  # 10, 12
    for seed in SEEDS:
        draw = random.Random(seed)
        attempt = draw.randint(2, 5)
        it = Told(seed, terms=terms_of(round=3, attempt=attempt))
        if signed:
            it.agreed()
        site = it.sites[it.victim]
        site.promises = _after_kill_9(site)
        asked = terms_of(round=3, attempt=attempt + draw.choice([1, 2]) if signed else draw.randint(1, attempt))
        [effect] = site.member(asked).start()
        said = "signed the survivors of round 3" if signed else "is not above the newest that this site has joined"
        assert said in effect.message.reason
        if not signed:
            assert len(site.member(replace(asked, attempt=attempt + 1)).start()) == 2


def _after_kill_9(site: Site) -> Promises:
    promises = Promises(site.promises.base_repeats_max)
    for promise in site.written:
        promises.add(promise)
    return promises


def test_a_site_whose_state_was_put_back_is_refused_by_all_its_peers_until_they_pin_it_again():  # 61
    for seed in SEEDS:
        draw = random.Random(f"put back {seed}")
        sites = sites_of(draw.randint(4, 6))
        for site in sites:
            site.promises.base_repeats_max = 99
        restored, before, after = draw.choice(sites), draw.randint(0, 3), draw.randint(1, 3)
        for number in range(1, before + 1):
            Honest.over(sites, terms_of(round=number)).agreed()
        backup = [*restored.written]
        for number in range(before + 1, before + after + 1):
            Honest.over(sites, terms_of(round=number)).agreed()
        restored.written = backup
        restored.promises = _after_kill_9(restored)
        for number in (1, 2):  # also in a later round
            session = Honest.over(sites, terms_of(round=before + after + number))
            for position, site in enumerate(sites):
                if site is not restored:
                    gone = session.ask(session.roster, position)
                    assert f"the promises of {restored.name} are others than this site has seen" in gone.reason
        restored.key = Ed25519PrivateKey.generate()
        for site in sites:
            site.pinned[restored.name] = restored.identity.key
        session = Honest.over(sites, terms_of(round=before + after + 3))
        assert all(isinstance(session.ask(session.roster, n), SealedShares) for n in range(len(sites)))


def test_one_base_in_more_rounds_than_the_policy_allows():  # 40
    for seed in SEEDS:
        draw = random.Random(seed)
        most, sites = draw.randint(1, 3), sites_of(4)
        for site in sites:
            site.promises.base_repeats_max = most
        for number in range(1, most + 1):
            Honest.over(sites, terms_of(round=number)).agreed()
        victim = draw.choice(sites)
        victim.promises = _after_kill_9(victim)
        [effect] = victim.member(terms_of(round=most + 1)).start()
        assert f"base_repeats_max = {most}" in effect.message.reason


@pytest.mark.parametrize("purpose", ["update", "evaluation"])
def test_sums_from_one_base_that_were_all_joined_before_one_was_signed(purpose):  # 40
    for seed in SEEDS:
        draw = random.Random(f"at once {seed}")
        most, sites = draw.randint(1, 3) if purpose == "update" else 1, sites_of(4)
        for site in sites:
            site.promises.base_repeats_max = most
        runs = [Honest.over(sites, terms_of(run=f"digits-{n}", purpose=purpose)) for n in range(most + 1)]
        draw.shuffle(runs)
        *signed, last = runs
        victim, is_masked = draw.randrange(4), draw.random() < 0.5
        if is_masked:
            last.masked()
        shared = None if is_masked else last.shared()
        for run in signed:
            run.agreed()
        said = last.ask(Survivors(frozenset(range(4))) if shared is None else shared[victim], victim)
        assert isinstance(said, Gone)
        assert (f"base_repeats_max = {most}" if purpose == "update" else "a sum of the evaluation") in said.reason


def test_rosters_that_differ_open_noise():  # 5
    for seed in SEEDS:
        it = Told(seed, count=6)
        vectors = vectors_of(it.sites, it.draw)
        sealed = [it.ask(it.roster, number) for number in range(5)]
        again = X25519PrivateKey.generate().public_key().public_bytes_raw()
        other = _resigned_by(it, 0, mask_key=again)
        assert isinstance(it.ask(other, 5), SealedShares), "site 0 lies with the coordinator, and shows it other keys"
        shown = {sender: sealed[sender].boxes[5] for sender in range(5)}
        assert WRONG_BOX in it.ask(Boxes(shown), 5).reason, "the sessions differ, so no box of the others opens"
        assert {*vectors} == {site.name for site in it.sites}


def _resigned_by(it: Told, number: int, **fields) -> Roster:
    keys = replace(it.keys[number], **fields)
    members = [*it.roster.members]
    members[number] = replace(keys, signature=it.sites[number].key.sign(keys.statement()))
    return replace(it.roster, members=tuple(members))


# ---------------------------------------------------------------- dishonest members


def _played(it: Told, lie) -> tuple[Session, list]:
    """Play a session, with answers that `lie(position, answer)` may change; return it and its effects."""
    session, effects = Session(it.roster, it.terms.digest), []
    queue = session.start()
    while queue:
        effect = queue.pop(it.draw.randrange(len(queue)))
        if not isinstance(effect, Tell):
            effects.append(effect)
            continue
        for answer in it.members[effect.position].ask(effect.question):
            if isinstance(answer, Mask):
                queue += session.masked(effect.position)
            elif isinstance(answer, Send) and isinstance(answer.message, Gone):
                queue += session.left(effect.position, answer.message.reason)
            elif isinstance(answer, Send):
                queue += session.answered(effect.position, lie(effect.position, answer.message))
    return session, effects


def test_a_bad_share_is_named():  # 52
    for seed in SEEDS:
        it = Told(seed, count=random.Random(seed).randint(5, 8))
        liar = it.victim

        def lie(position, answer, it=it, liar=liar):
            if position == liar and isinstance(answer, Reveal):
                wrong = [*answer.shares]
                wrong[it.draw.randrange(len(wrong))] += 1
                return Reveal(tuple(each % PRIME for each in wrong))
            return answer

        session, effects = _played(it, lie)
        while isinstance(effects[-1], OpenSum):
            reveals = dict(effects[-1].reveals)
            try:
                opened = open_sum(session.roster, session.id, session.masking, session.survivors, reveals)
            except NotOpened:
                effects += session.refused() or session.due()
                continue
            assert opened.wrong <= {liar}
            assert opened.wrong == {liar} or liar not in reveals
            break
        else:
            raise AssertionError(effects[-1])


def test_wrong_boxes_and_signatures_cost_their_sender_its_place():  # 53
    for seed in SEEDS:
        it = Told(seed)
        liar, kind = it.victim, it.draw.choice([SealedShares, Agreement])
        change = {
            SealedShares: lambda answer, it=it: SealedShares({**answer.boxes, it.other: b""}),
            Agreement: lambda answer: Agreement(bytes(64)),
        }[kind]

        def lie(at, answer, change=change, liar=liar, kind=kind):
            return change(answer) if at == liar and type(answer) is kind else answer

        session, effects = _played(it, lie)
        assert liar in session.gone
        assert liar not in session.reveals
        is_enough = it.size - 1 >= it.roster.threshold
        assert isinstance(effects[-1], OpenSum if is_enough else Fail)


def test_silence_at_each_stage_ends_it_when_it_is_due():  # 56
    for seed in SEEDS:
        it = Told(seed, count=random.Random(seed).randint(4, 8))
        silent = it.draw.sample(range(it.size), it.draw.randint(1, it.size))
        stage = it.draw.choice([SealedShares, None, Agreement, Reveal])
        session = Session(it.roster, it.terms.digest)
        queue, ended = session.start(), []
        while not ended:
            if not queue:
                queue += session.due()
                continue
            effect = queue.pop()
            if not isinstance(effect, Tell):
                ended.append(effect)
                continue
            for answer in it.members[effect.position].ask(effect.question):
                message = getattr(answer, "message", None)
                if hasattr(answer, "promise") or (effect.position in silent and stage in (type(message), message)):
                    continue
                queue += (
                    session.masked(effect.position) if message is None else session.answered(effect.position, message)
                )
        is_enough = it.size - len(silent) >= it.roster.threshold
        assert isinstance(ended[0], OpenSum if is_enough else Fail)
        if isinstance(ended[0], Fail):
            assert ended[0].may_repeat == (stage in (SealedShares, None))


def test_random_masked_words_are_in_no_sum_that_counts():  # 50
    """The canaries of `secure/exact` are what finds them (`tests/aggregation/masked`); here, that the sum is noise."""
    for seed in SEEDS:
        it = Told(seed)
        vectors = vectors_of(it.sites, it.draw)
        masked = {}
        for number, boxes in enumerate(it.shared()):
            [mask] = it.members[number].ask(boxes)
            masked[number] = masked_in_parts(vectors[it.name(number)], mask.streams)
        masked[it.victim] = vectors_of(it.sites, it.draw)[it.name(it.victim)]
        signatures = {n: it.ask(Survivors(it.all_but()), n).signature for n in range(it.size)}
        reveals = {n: it.ask(Opening(signatures), n).shares for n in range(it.size)}
        opened = open_sum(it.roster, it.members[0]._session, it.all_but(), it.all_but(), reveals)
        total = sum(masked.values(), np.zeros(SIZE, np.uint32))
        for stream in opened.streams:
            add_stream(total, stream.key, stream.sign)
        honest = sum((v for name, v in vectors.items() if name != it.name(it.victim)), np.zeros(SIZE, np.uint32))
        assert np.count_nonzero(total - honest == masked[it.victim]) == 0
