"""Dishonest moves within a round of secure sums, each in 20 runs; the numbers are those of the list of moves."""

import random

from atoll.protocol.secure.messages import Agreement, Boxes, Gone, MemberKeys, Opening, Roster, SealedShares, Survivors
from atoll.protocol.vocabulary import Fate, LossReason, RejectReason, RoundId
from atoll.server.rounds import events as ev
from atoll.server.rounds import session_events as of_sessions
from tests.server.rounds.secure_federation import KIND, SecureRun, fates
from tests.server.sessions.small_federation import SIZE, Site, terms_of

SEEDS = range(20)


def test_an_update_masked_for_a_sum_whose_survivors_were_told_is_in_no_sum():  # 47
    for seed in SEEDS:
        draw = random.Random(f"late {seed}")
        run = SecureRun(draw.randint(5, 9), draw, rounds=1, meshes=0.5)
        late, upload, told = draw.choice([*run.sites]), run.upload, run.send
        run.upload = lambda name, number, late=late, upload=upload: None if name == late else upload(name, number)

        def send(effect, run=run, told=told, upload=upload, late=late):
            told(effect)
            if isinstance(effect, of_sessions.TellMember) and isinstance(effect.question, Survivors | Opening):
                run.queue.append(lambda: upload(late, 1))

        run.send = send
        assert run.run()
        assert {*run.refused} == {RejectReason.NOT_IN_SESSION}
        assert run.opened == [(1, 0, tuple(sorted({*run.sites} - {late})))]


def test_a_member_whose_site_forbids_the_run_within_a_session_leaves_and_the_others_open_their_sum():  # 49
    for seed in SEEDS:
        draw = random.Random(f"forbidden {seed}")
        run = SecureRun(draw.randint(5, 9), draw, rounds=1)
        victim, stage = draw.choice([*run.sites]), draw.choice([Roster, Boxes, Survivors, Opening])
        asked, left = run.at_site, []

        def at_site(effect, run=run, victim=victim, stage=stage, asked=asked, left=left):
            is_told = isinstance(effect, of_sessions.TellMember) and effect.client_id == victim
            if is_told and (left or isinstance(effect.question, stage)):
                at = effect.session, effect.attempt
                member = run.work[victim, 1].members[at]
                left.append(member)
                run.effects(victim, 1, *at, member.leave("no longer allowed by the policy"))
            else:
                asked(effect)

        run.at_site = at_site
        assert run.run()
        assert {member._secrets for member in left} == {None}
        assert {member.start()[-1].message for member in left} == {Gone("no longer allowed by the policy")}
        # what it has masked is in the sum if it left after that, and its own share of no other is needed
        [(_, _, members)] = run.opened
        assert (victim in members) == (stage in (Survivors, Opening))
        assert {*members} >= {*run.sites} - {victim}


def test_a_member_whose_certificate_is_revoked_within_a_session_is_lost_and_the_others_open_their_sum():  # 49
    """The coordinator tells it nothing more, and takes nothing more from it; what it had masked by then stays."""
    for seed in SEEDS:
        draw = random.Random(f"revoked {seed}")
        run = SecureRun(draw.randint(5, 9), draw, rounds=2)
        victim, stage = draw.choice([*run.sites]), draw.choice([Roster, Boxes, Survivors, Opening])
        asked, told, upload, gone, accepted = run.at_site, run.send, run.upload, [], []

        def at_site(effect, run=run, victim=victim, stage=stage, asked=asked, gone=gone):
            asked(effect)
            is_told = isinstance(effect, of_sessions.TellMember) and effect.client_id == victim
            if is_told and isinstance(effect.question, stage) and not gone:
                run.post(ev.ClientLost(victim, LossReason.REVOKED))  # while its answer is on the way
                gone.append(victim)

        def send(effect, told=told, gone=gone):
            assert effect.client_id not in gone, "a revoked client is asked nothing"
            told(effect)

        def uploaded(name, number, run=run, victim=victim, upload=upload, gone=gone, accepted=accepted):
            before = not gone
            upload(name, number)
            if name == victim and run.machine.record_of(RoundId(number)).clients[name].digest is not None:
                accepted.append(before)

        run.at_site, run.send, run.upload = at_site, send, uploaded
        assert run.run()
        first, second = (run.machine.ledger.past[RoundId(number)] for number in (1, 2))
        assert accepted in ([], [True]), "no update of a revoked client is accepted"
        [(_, _, members), (_, _, later)] = run.opened
        assert (victim in members) == bool(accepted) == (stage in (Survivors, Opening))
        assert {*members} >= {*run.sites} - {victim}
        assert victim not in later
        assert victim not in fates(second)
        if not accepted:
            assert (fates(first)[victim], first.clients[victim].reason) == (Fate.LOST, LossReason.REVOKED)


def test_messages_of_a_client_that_is_no_member_change_nothing():  # 58
    contents = {KIND[SealedShares], KIND[Agreement], *KIND.values(), of_sessions.KeysCame}
    for seed in SEEDS:
        draw = random.Random(f"stranger {seed}")
        run = SecureRun(draw.randint(4, 8), draw, rounds=1)
        stranger, post = Site("site-99"), run.post
        said = []

        def posted(event, run=run, post=post, said=said, stranger=stranger, draw=draw):
            post(event)
            kind = type(event)
            if kind in contents and run.machine.round is not None:
                copied = kind(stranger.name, event.round_id, event.session, event.attempt, event.content)
                assert not run.machine.round.is_news_of(copied), "it is not even journaled"
                before = run.machine.round.record
                assert run.machine.receive(copied, run.now) == ()
                assert run.machine.round is None or run.machine.round.record == before
                said.append(kind)

        run.post = posted
        assert run.run()
        assert {*said} == contents
        [(_, _, members)] = run.opened
        record = run.machine.ledger.past[RoundId(1)]
        assert stranger.name not in (*members, *fates(record))
        assert {*fates(record).values()} == {Fate.REPORTED}
        sent = [effect.message for effect in stranger.member(terms_of()).start() if hasattr(effect, "message")]
        assert isinstance(sent[0], MemberKeys), "it could have sent keys of its own"
        update = ev.Update(stranger.name, RoundId(1), 0, "0" * 64, 1, 1.0, 4 * SIZE)
        assert not [e for e in run.machine.receive(ev.UpdateReceived(update), run.now) if isinstance(e, ev.Aggregate)]
