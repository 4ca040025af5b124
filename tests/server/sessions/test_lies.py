"""Dishonest coordinators and members: each lie is refused by the member that it is told, with its reason.

Each check of a member has a lie here that passes without it.
"""

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from atoll.client.secure.member import Mask, Member, MemberRules, Send, Stage
from atoll.client.secure.promises import PeerChains, Promises
from atoll.protocol.secure.messages import (
    BOX_BYTES,
    Agreement,
    Boxes,
    Chain,
    Gone,
    MemberKeys,
    Opening,
    Reveal,
    Roster,
    Survivors,
    survivors_statement,
)
from tests.server.sessions.small_federation import Site, privacy_of, sites_of, terms_of

LOW_ORDER = bytes(32)


class Honest:
    """Sites in a session up to some question, answered honestly; `ask` tells the first site something else."""

    def __init__(self, count=5, terms=None, sites=None, **rules):
        self.terms = terms or terms_of()
        self.sites = sites or sites_of(count, **rules)
        self.members = [site.member(self.terms) for site in self.sites]
        self.keys = [self.sent(number, member.start()) for number, member in enumerate(self.members)]
        self.roster = Roster(self.terms.threshold_of(len(self.sites)), tuple(self.keys))

    @classmethod
    def over(cls, sites, terms):
        """Return another session of the same sites."""
        return cls(terms=terms, sites=sites)

    def sent(self, number, effects):
        for effect in effects:
            if hasattr(effect, "promise"):
                self.sites[number].keep(effect.promise)
        messages = [effect.message for effect in effects if isinstance(effect, Send)]
        return messages[0] if messages else None

    def ask(self, question, number=0):
        """Ask a member, and return its message."""
        return self.sent(number, self.members[number].ask(question))

    def reason(self, question):
        """Ask the first member, which must leave; return why."""
        gone = self.ask(question)
        assert isinstance(gone, Gone), gone
        assert self.members[0].stage is Stage.ENDED
        assert self.members[0]._secrets is None
        return gone.reason

    def shared(self):
        """All members answer the roster; return the boxes by receiver."""
        sealed = [self.ask(self.roster, number) for number in range(len(self.members))]
        return [
            Boxes({sender: each.boxes[number] for sender, each in enumerate(sealed) if sender != number})
            for number in range(len(self.members))
        ]

    def masked(self):
        """All members mask."""
        for number, boxes in enumerate(self.shared()):
            assert isinstance(self.members[number].ask(boxes)[0], Mask)

    def agreed(self, survivors=None):
        """All survivors sign; return their agreements."""
        self.masked()
        self.survivors = frozenset(range(len(self.members)) if survivors is None else survivors)
        return {number: self.ask(Survivors(self.survivors), number).signature for number in sorted(self.survivors)}

    def with_keys(self, number, **fields):
        """Return the roster with other fields in one member's keys, signed by its site again."""
        keys = replace(self.keys[number], **fields)
        signed = replace(keys, signature=self.sites[number].key.sign(keys.statement()))
        members = [*self.roster.members]
        members[number] = signed
        return replace(self.roster, members=tuple(members))


def unsigned(honest, **fields):
    """Return the roster with other fields in the second member's keys, under its old signature."""
    members = [*honest.roster.members]
    members[1] = replace(members[1], **fields)
    return replace(honest.roster, members=tuple(members))


ROSTERS = {
    "1 a mask key of the coordinator": (
        lambda it: unsigned(it, mask_key=X25519PrivateKey.generate().public_key().public_bytes_raw()),
        "the signature of site-01 is wrong",
    ),
    "a box key of the coordinator": (
        lambda it: unsigned(it, box_key=X25519PrivateKey.generate().public_key().public_bytes_raw()),
        "the signature of site-01 is wrong",
    ),
    "another commitment": (lambda it: unsigned(it, commitment=bytes(32)), "the signature of site-01 is wrong"),
    "2 a signature of the coordinator's": (
        lambda it: unsigned(replaced := it, signature=Ed25519PrivateKey.generate().sign(replaced.keys[1].statement())),
        "the signature of site-01 is wrong",
    ),
    "3 another site key under a known name": (
        lambda it: _with_other_site_key(it),
        "the key of site-01 is not pinned",
    ),
    "4 too few others": (
        lambda it: replace(it.roster, members=it.roster.members[:2], threshold=2),
        "the roster has 2 members; this site demands 3",
    ),
    "4 a stranger": (lambda it: _with_stranger(it), "the key of site-99 is not pinned"),
    "6, 7 other terms": (
        lambda it: it.with_keys(1, terms=terms_of(model="cd" * 32).digest),
        "site-01 has other terms",
    ),
    "8 a threshold below the rule": (lambda it: replace(it.roster, threshold=3), "threshold 3; the terms give 4"),
    "9 a threshold above the rule": (lambda it: replace(it.roster, threshold=5), "threshold 5; the terms give 4"),
    "16 a name twice": (
        lambda it: replace(it.roster, members=(it.roster.members[0], *it.roster.members[:4])),
        "the roster's names are not sorted and unique",
    ),
    "names out of order": (
        lambda it: replace(it.roster, members=it.roster.members[::-1]),
        "the roster's names are not sorted and unique",
    ),
    "without this site": (
        lambda it: replace(it.roster, members=it.roster.members[1:], threshold=3),
        "the roster does not have the keys that this site has sent",
    ),
    "this site's older keys": (
        lambda it: it.with_keys(0, chain=Chain(0, bytes(32))),
        "the roster does not have the keys that this site has sent",
    ),
    "21 a mask key of low order": (lambda it: it.with_keys(1, mask_key=LOW_ORDER), "a key of site-01 is none"),
    "21 a box key of low order": (lambda it: it.with_keys(1, box_key=LOW_ORDER), "a key of site-01 is none"),
    "a key that is too short": (lambda it: it.with_keys(1, mask_key=b"short"), "a key of site-01 is none"),
    "22 a mask key twice": (
        lambda it: it.with_keys(1, mask_key=it.keys[2].mask_key),
        "two members of the roster have one mask key",
    ),
    "22 a box key twice": (
        lambda it: it.with_keys(1, box_key=it.keys[2].box_key),
        "two members of the roster have one box key",
    ),
}


def _with_other_site_key(it):
    key = Ed25519PrivateKey.generate()
    keys = replace(it.keys[1], site=replace(it.keys[1].site, key=key.public_key().public_bytes_raw()))
    members = [*it.roster.members]
    members[1] = replace(keys, signature=key.sign(keys.statement()))
    return replace(it.roster, members=tuple(members))


def _with_stranger(it):
    stranger = Site("site-99")
    [_, send] = stranger.member(it.terms).start()
    return replace(it.roster, members=(*it.roster.members[:4], send.message))


@pytest.mark.parametrize(("roster", "reason"), ROSTERS.values(), ids=ROSTERS)
def test_a_false_roster_is_refused(roster, reason):
    honest = Honest()
    assert reason in honest.reason(roster(honest))


def test_more_members_than_the_terms_allow_are_refused():
    honest = Honest(5, terms_of(members_max=4))
    assert honest.reason(honest.roster) == "the roster has 5 members; the terms allow 4"


def test_a_threshold_that_colluders_could_use_twice_is_refused():
    honest = Honest(5, terms_of(threshold="3"), colluders_max=1)
    assert (
        "threshold 3 of 5 members; this site demands more than half of members and 1 colluders (colluders_max)"
        in honest.reason(honest.roster)
    )


def test_a_member_names_all_that_it_refuses_and_nobody_where_the_roster_is_to_blame():
    honest = Honest()
    del honest.sites[0].pinned["site-01"], honest.sites[0].pinned["site-03"]
    gone = honest.ask(honest.roster)
    assert gone == Gone("the key of site-01 is not pinned (site-03 refused, too)", ("site-01", "site-03"))
    assert honest.sent(0, honest.members[0].start()) == gone
    again = Honest()
    boxes = again.shared()[0].boxes
    assert again.ask(Boxes({**boxes, 1: boxes[2], 4: b""})).refused == ("site-01", "site-04")
    unsorted = Honest()
    assert unsorted.ask(replace(unsorted.roster, members=unsorted.roster.members[::-1])).refused == ()


def test_a_threshold_above_the_number_of_members_is_refused():
    honest = Honest(4, terms_of(threshold="5"))
    assert honest.reason(honest.roster).startswith("threshold 5 of 4 members")


@pytest.mark.parametrize(("colluders", "is_refused"), [(1, False), (2, True), (3, True)])
def test_two_quorums_share_a_member_that_is_none_of_the_colluders(colluders, is_refused):
    honest = Honest(6, terms_of(threshold="4"), colluders_max=colluders)
    assert isinstance(honest.ask(honest.roster), Gone) == is_refused


def test_a_sum_of_two_is_refused_whatever_the_policy_says():
    honest = Honest(2, min_others=1)
    assert honest.reason(honest.roster) == "the roster has 2 members; this site demands 3 (min_others = 1)"


def test_fewer_members_than_their_noise_needs_are_refused_at_each_set():
    """After 9 of 12 have opened, an attempt of the other 3 would hold a third of the noise."""
    terms = terms_of(privacy=privacy_of(4, 1).text())
    demand = "(min_others = 2, the noise of 4 honest members)"
    roster = Honest(4, terms)
    assert roster.reason(roster.roster) == f"the roster has 4 members; this site demands 5 {demand}"
    demanded = "this site demands 5 (threshold 5, min_others = 2, the noise of 4 honest members)"
    honest = Honest(6, terms)
    boxes = honest.shared()[0].boxes
    assert honest.reason(Boxes({each: boxes[each] for each in [1, 2, 3]})) == f"4 members send shares; {demanded}"
    again = Honest(6, terms)
    again.masked()
    assert again.reason(Survivors(frozenset({0, 1, 2, 3}))) == f"4 members survive; {demanded}"
    enough = Honest(6, terms)
    enough.masked()
    assert isinstance(enough.ask(Survivors(frozenset({0, 1, 2, 3, 4}))), Agreement)


def test_a_site_that_assumes_more_colluders_than_the_terms_needs_more_members_for_the_noise():
    honest = Honest(8, terms_of(privacy=privacy_of(5, 1).text()), colluders_max=2)
    boxes = honest.shared()[0].boxes
    reason = honest.reason(Boxes({each: boxes[each] for each in [1, 2, 3, 4, 5]}))
    assert reason.startswith("6 members send shares; this site demands 7")


def test_noise_of_the_coordinator_needs_no_number_of_members():
    terms = terms_of(privacy=privacy_of(0, 0, noise_by="coordinator").text())
    honest = Honest(3, terms)
    honest.masked()
    assert isinstance(honest.ask(Survivors(frozenset({0, 1, 2}))), Agreement)


def test_a_peer_whose_state_was_put_back_is_refused_for_good():
    honest = Honest()
    site, keys = honest.sites[0], honest.keys[1]
    site.peers.remember(keys.site.key, Chain(keys.chain.count, bytes(32)))
    honest.ask(honest.roster)
    for number in (2, 3):
        again = Honest.over(honest.sites, terms_of(round=number))
        assert "the promises of site-01 are others than this site has seen" in again.reason(again.roster)


def test_peers_are_remembered_as_their_keys_show_them():
    honest = Honest()
    honest.ask(honest.roster)
    assert [*honest.sites[0].peers.items()] == [(keys.site.key, keys.chain) for keys in honest.keys]


def test_a_peer_whose_state_was_put_back_is_refused():
    honest = Honest()
    keys = honest.keys[1]
    honest.sites[0].peers.remember(keys.site.key, Chain(keys.chain.count, bytes(32)))
    assert "the promises of site-01 are others than this site has seen" in honest.reason(honest.roster)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda boxes: {**boxes, 0: bytes(BOX_BYTES)}, "a box from this site itself"),  # 13
        (
            lambda boxes: {each: boxes[each] for each in [1, 2]},  # 14
            "3 members send shares; this site demands 4 (threshold 4, min_others = 2)",
        ),
        (lambda boxes: {**boxes, 7: bytes(BOX_BYTES)}, "members that send shares are none of those before"),  # 15
        (lambda boxes: {**boxes, 1: boxes[2]}, "the box of site-01: it was sealed with another key, or changed"),  # 19
        (lambda boxes: {**boxes, 1: boxes[1][:-1]}, "the box of site-01: it was sealed with another key, or changed"),
        (lambda boxes: {**boxes, 1: b""}, "the box of site-01: it was sealed with another key, or changed"),  # 20
    ],
)
def test_false_boxes_are_refused(change, reason):
    honest = Honest()
    boxes = honest.shared()[0].boxes
    assert honest.reason(Boxes(change(boxes))) == reason


def test_boxes_for_another_and_of_another_session_are_refused():  # 17, 18
    honest = Honest()
    shared = honest.shared()
    theirs = {**shared[0].boxes, 1: shared[2].boxes[1]}
    assert honest.reason(Boxes(theirs)) == "the box of site-01: it was sealed with another key, or changed"
    again, other = Honest(), Honest()
    mixed = {**again.shared()[0].boxes, 1: other.shared()[0].boxes[1]}
    assert again.reason(Boxes(mixed)) == "the box of site-01: it was sealed with another key, or changed"


@pytest.mark.parametrize(
    ("survivors", "reason"),
    [
        ({0, 1, 2, 3, 9}, "members that survive are none of those before"),  # 23
        ({1, 2, 3, 4}, "this site is not among the members that survive"),  # 24
        ({0, 1, 2}, "3 members survive; this site demands 4 (threshold 4, min_others = 2)"),  # 25
    ],
)
def test_false_survivors_are_refused(survivors, reason):
    honest = Honest()
    honest.masked()
    assert honest.reason(Survivors(frozenset(survivors))) == reason


def test_survivors_of_whom_one_has_not_shared_are_refused():  # 23
    honest = Honest(6)
    boxes = honest.shared()[0].boxes
    assert isinstance(honest.members[0].ask(Boxes({each: boxes[each] for each in [1, 2, 3, 4]}))[0], Mask)
    assert honest.reason(Survivors(frozenset({0, 1, 2, 3, 5}))) == "members that survive are none of those before"


def test_fewer_others_than_the_policy_demands_are_refused_at_each_set():  # 25
    honest = Honest(5, min_others=4)
    boxes = honest.shared()[0].boxes
    demanded = "this site demands 5 (threshold 4, min_others = 4)"
    assert honest.reason(Boxes({each: boxes[each] for each in [1, 2, 3]})) == f"4 members send shares; {demanded}"
    again = Honest(5, min_others=4)
    again.masked()
    assert again.reason(Survivors(frozenset({0, 1, 2, 3}))) == f"4 members survive; {demanded}"


@pytest.mark.parametrize("kind", [Roster, Boxes, Survivors, Opening])
def test_a_question_that_is_repeated_gets_the_same_bytes_and_another_one_ends_the_session(kind):  # 11, 26, 32, 33, 35
    honest = Honest()
    agreements = honest.agreed()
    first, *_ = [honest.ask(Opening(agreements))]
    answers = honest.members[0]._answers
    question, effects = answers[kind]
    assert honest.members[0].ask(question) == [*effects]
    assert isinstance(first, Reveal)
    other = {
        Roster: lambda: replace(question, threshold=5),
        Boxes: lambda: Boxes({**question.boxes, 1: bytes(BOX_BYTES)}),
        Survivors: lambda: Survivors(question.positions - {4}),
        Opening: lambda: Opening({each: question.signatures[each] for each in [0, 1, 2, 3]}),
    }[kind]()
    assert honest.reason(other) == f"the coordinator has sent two different {kind.__name__} in one session"


def test_agreements_that_are_too_few_or_of_others_open_nothing():  # 27 to 30
    honest = Honest()
    agreements = honest.agreed({0, 1, 2, 3})
    few = {each: agreements[each] for each in [0, 1, 2]}
    assert honest.reason(Opening(few)) == "3 agreements; needed: 4"

    honest = Honest()
    agreements = honest.agreed({0, 1, 2, 3})
    assert honest.reason(Opening({**agreements, 4: agreements[0]})) == "an agreement of a member that is no survivor"

    honest = Honest()
    agreements = honest.agreed({0, 1, 2, 3})
    one = dict.fromkeys(range(4), agreements[0])
    assert honest.reason(Opening(one)) == "the agreement of site-01 is to other survivors"

    honest = Honest(6)
    agreements = honest.agreed()
    session = honest.members[0]._session
    others = survivors_statement(session, {0, 1, 2, 3, 4}, 6)
    forged = {**agreements, 3: honest.sites[3].key.sign(others)}
    assert honest.reason(Opening(forged)) == "the agreement of site-03 is to other survivors"


@pytest.mark.parametrize("question", [Boxes({}), Survivors(frozenset({0, 1, 2, 3})), Opening({})])
def test_a_question_out_of_turn_ends_the_session(question):  # 31
    honest = Honest()
    assert honest.reason(question) == f"{type(question).__name__} in the stage keys"


def test_a_reveal_has_one_share_of_each_member_and_nothing_else():  # 34
    honest = Honest()
    agreements = honest.agreed({0, 1, 2, 3})
    held = {number: shares for number, shares in honest.members[0]._secrets.shares.items()}
    reveal = honest.ask(Opening(agreements))
    assert reveal.shares == (*(held[number].seed for number in range(4)), held[4].key)
    assert honest.members[0]._secrets is None


class TestPromises:
    def of(self, *terms, signed=False):
        site = sites_of(3)[0]
        for each in terms:
            for effect in site.member(each).start():
                if hasattr(effect, "promise"):
                    site.keep(effect.promise)
        return site

    def fault(self, site, terms):
        [effect] = [effect for effect in site.member(terms).start() if isinstance(effect, Send)]
        return effect.message.reason if isinstance(effect.message, Gone) else ""

    def test_an_attempt_is_joined_once_and_none_before_it(self):  # 10
        site = self.of(terms_of(round=2, attempt=2))
        newest = "is not above the newest that this site has joined: round 2, attempt 2"
        assert self.fault(site, terms_of(round=2, attempt=2)) == f"round 2, attempt 2 {newest}"
        assert self.fault(site, terms_of(round=2, attempt=1)) == f"round 2, attempt 1 {newest}"
        assert self.fault(site, terms_of(round=1, attempt=9)) == f"round 1, attempt 9 {newest}"
        assert self.fault(site, terms_of(round=2, attempt=3)) == ""
        assert self.fault(site, terms_of(round=1, run="other-1")) == ""
        assert self.fault(site, terms_of(round=1, purpose="evaluation")) == ""

    def test_no_attempt_of_a_signed_round_is_joined_after_a_restart_too(self):  # 12
        honest = Honest()
        honest.agreed()
        site = honest.sites[0]
        restarted = Promises(base_repeats_max=2)
        for promise in site.written:
            restarted.add(promise)
        site.promises = restarted
        assert restarted.chain.count == 1, "a session of which two promises were given"
        assert "this site has signed the survivors of round 1" in self.fault(site, terms_of(attempt=2))

    def test_sums_from_one_base_are_counted(self):  # 40
        site = sites_of(3)[0]
        for number in (1, 2):
            honest = Honest(terms=terms_of(round=number))
            honest.agreed()
            for promise in honest.sites[0].written:
                site.keep(promise)
        assert self.fault(site, terms_of(round=3)) == (
            "this site has signed 2 sums from version 0's model, over all runs; base_repeats_max = 2: start the run "
            "from another seed or model.start, or raise it in this site's policy"
        )
        assert self.fault(site, terms_of(round=3, model="cd" * 32)) == ""

    def test_a_join_is_durable_before_its_keys_leave_and_in_them(self):
        site = sites_of(3)[0]
        keep, send = site.member(terms_of()).start()
        assert keep.promise.kind == "joined"
        assert isinstance(send.message, MemberKeys)
        site.keep(keep.promise)
        assert send.message.chain == site.promises.chain

    def test_the_end_of_a_chain_depends_on_every_promise_of_it(self):
        def end(*attempts):
            return self.of(*(terms_of(round=2, attempt=attempt) for attempt in attempts)).promises.chain

        assert end(1, 3) != end(2, 3)
        assert end(1, 3).count == end(2, 3).count == 2
        assert end(1, 3) == end(1, 3)


class TestPeerChains:
    def test_a_known_count_with_another_hash_is_a_fork(self):
        peers = PeerChains()
        peers.remember(b"key", Chain(5, b"five"))
        peers.remember(b"key", Chain(7, b"seven"))
        assert not peers.is_fork(b"key", Chain(5, b"five"))
        assert not peers.is_fork(b"key", Chain(6, b"six"))
        assert peers.is_fork(b"key", Chain(7, b"other"))
        assert not peers.is_fork(b"other", Chain(7, b"other"))

    def test_an_end_from_before_all_that_are_remembered_is_a_fork(self):
        peers = PeerChains()
        for count in range(100):
            peers.remember(b"key", Chain(count, bytes([count])))
        assert [chain.count for _, chain in peers.items()] == [*range(36, 100)]
        assert peers.is_fork(b"key", Chain(35, bytes([35])))
        assert not peers.is_fork(b"key", Chain(36, bytes([36])))


def test_a_signature_is_durable_before_it_leaves():
    honest = Honest()
    honest.masked()
    keep, send = honest.members[0].ask(Survivors(frozenset(range(5))))
    assert keep.promise.kind == "signed"
    assert isinstance(send.message, Agreement)
    assert keep.promise.survivors, "what was signed"


def test_nothing_that_unmasks_an_update_stays_in_memory_after_the_reveal():
    honest = Honest()
    agreements = honest.agreed()
    member = honest.members[0]
    boxes, (mask,) = member._answers[Boxes]
    secret = {stream.key for stream in mask.streams} | {member._secrets.seed, member._secrets.mask.private_bytes_raw()}
    honest.ask(Opening(agreements))
    assert {each for each in _reachable(member) if isinstance(each, bytes)}.isdisjoint(secret)
    assert member.ask(boxes) == []


def _reachable(value, seen=None):
    """Yield all values that an object holds, through its fields and collections."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    yield value
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else []
    inner += value if isinstance(value, list | tuple | set | frozenset) else []
    inner += getattr(value, "__dict__", {}).values()
    inner += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    for each in inner:
        yield from _reachable(each, seen)


def test_a_member_that_has_left_says_so_when_it_is_invited_again():
    honest = Honest()
    assert honest.reason(replace(honest.roster, threshold=5)) == "threshold 5; the terms give 4 for 5 members"
    [again] = honest.members[0].start()
    assert again.message == Gone("threshold 5; the terms give 4 for 5 members")


def test_a_member_leaves_once():
    member = Member(
        "site-00",
        terms_of(),
        MemberRules(),
        key=Ed25519PrivateKey.generate(),
        site=Site("site-00").identity,
        promises=Promises(2),
        peers=PeerChains(),
        trust=lambda keys: None,
    )
    member.start()
    assert member.leave("the policy has changed") == [Send(Gone("the policy has changed"))]
    assert member.leave("again") == []
