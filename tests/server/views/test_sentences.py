import json
import re

import pytest

from atoll.protocol import vocabulary
from atoll.protocol.vocabulary import (
    AbandonReason,
    CloseReason,
    FailureReason,
    Fate,
    LossReason,
    Phase,
    RejectReason,
    ReleaseReason,
)
from atoll.protocol.wire.mesh_use import MeshUse
from atoll.server.journal.codec import decode_ledger, decode_record, encode_ledger, encode_record
from atoll.server.rounds.events import StopRequested
from atoll.server.rounds.record import CarriedRecord, ClientRecord, Outage, RoundRecord
from atoll.server.rounds.round_summary import summary
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.views.narration import narrate
from atoll.server.views.reasons import explain
from atoll.server.views.sentences import as_json, sentences
from tests.server.journal.test_codec import RULES, some_history
from tests.server.rounds.test_buffer_round import Flow

REASONS = (RejectReason, FailureReason, LossReason, CloseReason, AbandonReason, ReleaseReason)


def reported(at=3.1, **fields):
    return ClientRecord(0.0, Fate.REPORTED, at, digest="d", num_examples=1200, work=1.0, num_bytes=4_000_000, **fields)


def committed(clients, *, close=CloseReason.ENOUGH, **fields):
    given = {"cohort_size": 4, "quorum": 2, "num_candidates": 6, **fields}
    return RoundRecord(
        7,
        6,
        -2.0,
        num_needed_to_draw=4,
        phase=Phase.COMMITTED,
        drawn_at=0.0,
        deadline=10.0,
        closed_at=10.0,
        close_reason=close,
        ended_at=10.4,
        version=7,
        clients=clients,
        **given,
    )


def said_of(client, record=None):
    """Return the sentence about one client."""
    record = record or committed({})
    record.clients["west"] = client
    return next(text for text in sentences(record) if text.startswith("west ("))


USE = MeshUse(num_ranks=4, peak_bytes=2 * 10**9, steps_per_s=2.5, flops_per_s=4e12, peak_flops=1e13)


def test_the_use_of_a_mesh_is_in_the_sentence_and_in_the_record():
    client = reported(train_seconds=60.0, mesh=USE)
    record = committed({"west": client})
    assert f"60.0 s of training on {USE}" in said_of(client)
    assert "at most 2.0 GB of memory on a rank, MFU 40.0%" in str(USE)
    assert as_json(record)["clients"]["west"]["mesh"]["mfu"] == 0.4
    assert decode_record(encode_record(record), where="x") == record


def test_a_record_of_an_earlier_atoll_has_no_mesh():
    record = committed({"west": reported()})
    fields = json.loads(encode_record(record))
    del fields["clients"]["west"]["mesh"]
    assert decode_record(json.dumps(fields), where="x") == record


# ---------------------------------------------------------------- the round


def test_a_round_that_got_all_it_wanted():
    record = committed({name: reported() for name in ("north", "south", "east", "west")})
    assert sentences(record)[:3] == [
        "Round 7 started from version 6 and was committed as version 7 after 12.4 s: "
        "4 of the 4 wanted updates were in.",
        "4 of 6 available clients were invited: east, north, south, west.",
        "east (reported): its update was accepted 3.1 s after the invitation: "
        "1,200 examples, all of the requested work, 4.0 MB.",
    ]


def test_a_round_of_one():
    client = ClientRecord(0.0, Fate.REPORTED, 1.0, num_examples=1, work=1.0, num_bytes=1, used_in=7, train_seconds=0.5)
    record = committed({"west": client}, cohort_size=1, quorum=1, num_candidates=1)
    assert sentences(record) == [
        "Round 7 started from version 6 and was committed as version 7 after 12.4 s: 1 of the 1 wanted update was in.",
        "1 of 1 available client was invited: west.",
        "west (reported): its update was accepted 1.0 s after the invitation: "
        "1 example, all of the requested work, 1 B, 0.5 s of training.",
    ]


def test_a_round_with_late_updates_and_outages():
    record = committed({"north": reported()}, close=CloseReason.DEADLINE)
    record.carried = [
        CarriedRecord("south", 6, 1, "d", 300, 2**-0.5),
        CarriedRecord("east", 5, 2, "e", 1, 0.25),
        CarriedRecord("west", 6, 0, "f", 2, 1.0),
    ]
    record.superseded = ["x"]
    record.outages = [Outage(5.0, 12.0, 12.0), Outage(9.0, 4000.0, 3588.0)]
    assert sentences(record)[0].endswith(
        "after 12.4 s: the deadline had passed, with 1 of the 4 wanted updates and 3 late updates of earlier rounds "
        "(quorum 2)."
    )
    assert sentences(record)[3:] == [
        "Carried in: the late update of round 6 by south (300 examples, 1 version old, trained from version 5), "
        "which counts with 0.707 of its weight.",
        "Carried in: the late update of round 5 by east (1 example, 2 versions old, trained from version 4), "
        "which counts with 0.25 of its weight.",
        "Carried in: the late update of round 6 by west (2 examples, of the same version, trained from version 6), "
        "which counts with its full weight.",
        "1 late update of earlier rounds was not used: its client sent a newer one in this round.",
        "The coordinator was down for 12.0 s; the deadline moved by 12.0 s.",
        "The coordinator was down for 4,000.0 s; the deadline moved by 3,588.0 s, as far as outage_max allows.",
    ]
    record.superseded = ["x", "y"]
    assert "2 late updates of earlier rounds were not used: their clients sent newer ones in this round." in sentences(
        record
    )


def test_a_round_whose_codec_saved_bytes():
    clients = {name: reported(plain_bytes=128_000_000) for name in ("north", "south")} | {"old": reported()}
    record = committed(clients)
    assert sentences(record)[-1] == "The codec saved 248.0 MB of 256.0 MB (96.9 %)."
    assert summary(record)["bytes_saved"] == 248_000_000
    plain = committed({"north": reported(plain_bytes=4_000_000)})
    assert not any("codec" in sentence for sentence in sentences(plain))
    assert summary(plain)["bytes_saved"] == 0


def test_a_full_round_with_a_late_update():
    record = committed({"north": reported()}, cohort_size=1, quorum=1)
    record.carried = [CarriedRecord("south", 6, 1, "d", 300, 0.5)]
    assert sentences(record)[0].endswith("1 of the 1 wanted update and 1 late update of earlier rounds were in.")


@pytest.mark.parametrize("reason", AbandonReason)
def test_an_abandoned_round(reason):
    record = RoundRecord(7, 6, 0.0, 2, 2, 2, phase=Phase.ABANDONED, ended_at=3.0, abandon_reason=reason)
    assert sentences(record) == [
        f"Round 7 started from version 6 and was abandoned after 3.0 s: {explain(reason)}.",
    ]
    record.detail = "1 accepted, quorum 2"
    assert sentences(record)[0].endswith(f": {explain(reason)} (1 accepted, quorum 2).")


def test_a_round_that_is_open():
    record = RoundRecord(7, 6, 0.0, 2, 2, 3)
    assert sentences(record) == ["Round 7 started from version 6 and is waiting for clients: 3 must be connected."]
    record.phase, record.drawn_at, record.deadline = Phase.COLLECTING, 1.0, 61.0
    record.clients = {"north": reported(), "west": ClientRecord(1.0)}
    assert sentences(record)[0] == (
        "Round 7 started from version 6 and is collecting for 60.0 s: 1 of the 2 wanted updates is in (quorum 2)."
    )
    record.phase, record.close_reason, record.closed_at = Phase.AGGREGATING, CloseReason.ALL_ANSWERED, 5.0
    assert sentences(record)[0] == (
        "Round 7 started from version 6 and is being aggregated: all invited clients had answered, "
        "with 1 of the 2 wanted updates (quorum 2)."
    )


def test_a_large_cohort_is_counted_and_not_listed():
    record = committed({f"c{number:03}": reported() for number in range(23)})
    assert sentences(record)[1].endswith("c018, c019 and 3 more.")


# ---------------------------------------------------------------- the clients


def test_a_late_update_says_how_late():
    client = ClientRecord(0.0, Fate.LATE, 11.2, "too_late", "1.2 s after round 7 had closed")
    assert said_of(client) == (
        "west (late): its upload arrived 1.2 s after the round had closed and was refused (too_late)."
    )
    client.detail = "no round follows"
    assert said_of(client).endswith("refused: it arrived after the round had closed (too_late): no round follows.")
    client.reason, client.detail = "too_stale", "3 versions old, max_staleness is 1"
    assert said_of(client).endswith(
        "was refused: it was trained from a version that is too old (too_stale): 3 versions old, max_staleness is 1."
    )


def test_a_late_update_in_the_grace_period_of_others():
    record = committed({})
    record.closed_at = record.ended_at = None
    record.phase = Phase.COLLECTING
    client = ClientRecord(0.0, Fate.LATE, 10.5, "too_late", "0.5 s after round 7 had closed")
    assert "0.5 s after the deadline and was refused (too_late)." in said_of(client, record)


def test_a_late_update_that_was_kept_says_where_it_counts():
    client = reported(11.2)
    client.fate, client.work = Fate.CARRIED, 0.625
    text = (
        "west (carried): its upload arrived 1.2 s after the round had closed and was kept for the next committed "
        "round: 1,200 examples, 62.5 % of the requested work, 4.0 MB"
    )
    assert said_of(client) == f"{text}."
    client.used_in = 8
    assert said_of(client) == f"{text}; it counts in round 8."
    client.used_in, client.unused_because = None, "the run ended first (stopped)"
    assert said_of(client) == f"{text}; no model contains it: the run ended first (stopped)."


def test_a_late_update_of_an_abandoned_round():
    record = RoundRecord(
        7, 6, 0.0, 2, 2, 2, phase=Phase.ABANDONED, ended_at=3.0, abandon_reason=AbandonReason.BELOW_QUORUM
    )
    client = ClientRecord(0.0, Fate.LATE, 4.0, "too_late", "1.0 s after round 7 had closed")
    assert "arrived 1.0 s after the round had been abandoned" in said_of(client, record)


@pytest.mark.parametrize("reason", FailureReason)
def test_a_failure_is_explained(reason):
    client = ClientRecord(0.0, Fate.FAILED, 5.0, reason, "CUDA out of memory. ")
    expected = (
        f"west (failed): it gave up 5.0 s after the invitation: {explain(reason)} ({reason}): CUDA out of memory."
    )
    assert said_of(client) == expected


def test_a_lost_update_says_which_file_and_until_when_it_may_come_once_more():
    client = reported(1.0)
    client.lose("lost after it was accepted: x.bin is missing", 5.0)
    text = "west (failed): its update was lost after it was accepted: x.bin is missing, 5.0 s after the invitation"
    assert said_of(client, RoundRecord(7, 6, 0.0, 2, 2, 2)) == f"{text}; if it arrives again in time, it counts."
    why = AbandonReason.FILES_LOST
    record = RoundRecord(7, 6, 0.0, 2, 2, 2, phase=Phase.ABANDONED, ended_at=9.0, abandon_reason=why)
    assert said_of(client, record) == f"{text}."


@pytest.mark.parametrize("reason", RejectReason)
def test_a_refusal_is_explained(reason):
    client = ClientRecord(0.0, Fate.REFUSED, 5.0, reason)
    assert said_of(client) == (
        f"west (refused): its update was refused 5.0 s after the invitation: {explain(reason)} ({reason})."
    )


@pytest.mark.parametrize("reason", LossReason)
def test_a_loss_is_explained(reason):
    client = ClientRecord(0.0, Fate.LOST, 30.0, reason, num_reconnects=2)
    assert said_of(client) == (
        f"west (lost): it was given up 30.0 s after the invitation: {explain(reason)} ({reason}); "
        "it had reconnected twice."
    )


def test_stragglers_and_the_released():
    straggler = ClientRecord(0.0, Fate.STRAGGLER, 10.0, num_reconnects=1)
    assert said_of(straggler) == (
        "west (straggler): it had sent nothing when the round closed 10.0 s after the invitation; "
        "it had reconnected once."
    )
    straggler.upload_begun_at, straggler.num_reconnects = 9.0, 3
    assert "its upload was still under way when" in said_of(straggler)
    assert said_of(straggler).endswith("it had reconnected 3 times.")
    straggler.reason = FailureReason.OUT_OF_TIME
    assert "; it said later: it had done no work by the deadline (out_of_time);" in said_of(straggler)
    released = ClientRecord(0.0, Fate.RELEASED, 10.0)
    assert said_of(released) == (
        "west (released): it was told to stop 10.0 s after the invitation, as its update was no longer needed."
    )


def test_those_who_are_waited_for():
    client = ClientRecord(0.0)
    assert said_of(client) == "west (waiting): it has not reported yet."
    client.upload_begun_at, client.disconnected_at = 1.0, 2.0
    assert said_of(client) == "west (waiting): its upload is under way; its connection is down."


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1, "1 B"), (999, "999 B"), (1500, "1.5 kB"), (2 * 10**9, "2.0 GB")]
)
def test_sizes(num_bytes, text):
    client = reported()
    client.num_bytes = num_bytes
    assert said_of(client).endswith(f" {text}.")


# ---------------------------------------------------------------- the whole record


@pytest.mark.parametrize("reason", [reason for kind in REASONS for reason in kind], ids=repr)
def test_every_reason_has_words(reason):
    words = explain(reason)
    assert words[0].islower()
    assert words[-1].isalnum() or words[-1] == "]"


def test_no_kind_of_reason_is_left_out():
    kinds = {kind for name, kind in vars(vocabulary).items() if name.endswith("Reason")}
    assert kinds == set(REASONS)


def test_a_reason_of_a_later_atoll_is_still_shown():
    client = ClientRecord(0.0, Fate.FAILED, 5.0, "invented")
    assert said_of(client).endswith("for a reason that this Atoll does not know (invented).")


def records():
    """Every state of every round of a history that has all kinds of events."""
    machine = RunMachine(RULES)
    for at, event in some_history():
        machine.receive(event, at)
        for round_id in range(1, 5):
            if (record := machine.record_of(round_id)) is not None:
                yield record


def test_every_record_of_a_history_reads_like_sentences():
    for record in records():
        said = sentences(record)
        assert len(said) >= 1 + len(record.clients)
        for text in said:
            assert text.endswith(".")
            assert not re.search(r"\.\.|  | ,| \.|None|\(\)|-\d", text), text
        assert len(said) == len(set(said))


def test_the_summary_is_plain_values_and_counts_everyone_once():
    for record in records():
        line = summary(record)
        assert all(value is None or type(value) in (int, float, str) for value in line.values())
        assert sum(line[str(fate)] for fate in Fate) == line["invited"] == len(record.clients)
    last = summary(record)
    assert (last["round"], last["phase"], last["version"], last["reason"]) == (4, "committed", 3, "enough")
    assert (last["wanted"], last["candidates"], last["reported"], last["carried_in"]) == (2, 3, 2, 1)
    assert last["num_examples"] == 27
    assert last["seconds"] == 3.0
    assert list(line) == list(last)


def test_json_holds_the_whole_record_and_its_sentences():
    for record in records():
        fields = json.loads(json.dumps(as_json(record)))
        assert fields.pop("sentences") == sentences(record)
        assert decode_record(json.dumps(fields), where="here") == record


# ---------------------------------------------------------------- an asynchronous run


def filled():
    """A run in which c is slow: its update of round 1 counts in round 2, and d's comes too late for any."""
    flow = Flow(concurrency=4, buffer_size=2, max_staleness=1, deadline=60.0)
    flow.join("abcd", at=0)
    flow.update("a", at=9)
    flow.update("b", at=11)
    flow.commit(at=12)
    flow.update("a", at=21)
    return flow


def test_a_buffer_that_fills_says_how_far_it_is():
    assert sentences(filled().record)[:2] == [
        "Round 2 started from version 1 and is filling its buffer: 1 of the 2 wanted updates is in (quorum 2).",
        "2 clients were invited while its buffer filled: a, b.",
    ]


def test_a_buffer_that_was_committed_names_each_update_with_its_age_and_scale():
    flow = filled()
    flow.update("c", at=26, round_id=1)
    flow.fold(at=27)
    said = sentences(flow.record)
    assert said[0] == (
        "Round 2 started from version 1 and was committed as version 2 after 15.0 s: 2 of the 2 wanted updates were in."
    )
    assert "In the buffer: the update of round 2 by a (10 examples, fresh), scaled by 1." in said
    assert "In the buffer: the update of round 1 by c (10 examples, 1 version old), scaled by 0.707." in said
    assert "b (waiting): it has not reported yet." in said
    first = sentences(flow.machine.record_of(1))
    assert any(text.startswith("c (reported): its update was accepted 26.0 s after the invitation") for text in first)
    assert any(text.endswith("; it counts in round 2.") for text in first)
    line = summary(flow.record)
    assert (line["carried_in"], line["staleness"], line["num_examples"]) == (1, 1, 20)


def test_the_closing_line_of_an_asynchronous_run_has_the_number_of_dropped_updates():
    flow = filled()
    flow.update("b", at=22)
    flow.commit(at=23)
    state = decode_ledger(encode_ledger(flow.machine.ledger), where="a snapshot")
    assert state.num_too_old == 2
    stop = StopRequested("the disk is full")
    lines = list(narrate(flow.machine, stop, tuple(flow.do(stop, at=24))))
    assert lines[-1] == f"the run is stopped: {flow.machine.ledger.cause}; 2 updates dropped as too old"


def test_clients_of_an_asynchronous_run_that_were_told_to_stop():
    flow = filled()
    flow.update("b", at=22)
    flow.commit(at=23)
    first = sentences(flow.machine.record_of(1))
    assert summary(flow.machine.record_of(2))["too_old"] == 2
    assert (
        "2 invitations ended here, because the work was too old to count: c (of round 1, 2 versions old), "
        "d (of round 1, 2 versions old)." in sentences(flow.machine.record_of(2))
    )
    assert "d (released): it was told to stop 23.0 s after the invitation, as its update was no longer needed." in first
    flow.update("d", at=30, round_id=1)
    said = next(text for text in sentences(flow.machine.record_of(1)) if text.startswith("d ("))
    assert said == (
        "d (late): its update was refused 30.0 s after the invitation: it was trained from a version that is too old "
        "(too_stale): 2 versions old, max_staleness is 1."
    )
    flow.tick(at=83)
    said = next(text for text in sentences(flow.record) if text.startswith("a ("))
    assert said == "a (straggler): it had sent nothing at its deadline 60.0 s after the invitation."


def test_a_buffer_that_was_closed_early_says_why():
    flow = Flow(buffer_size=5, concurrency=2, quorum=2)
    flow.join("ab", at=0)
    flow.update("a", at=1)
    flow.update("b", at=2)
    assert sentences(flow.record)[0] == (
        "Round 1 started from version 0 and is being aggregated: no client trained any more, and no other could be "
        "invited, with 2 of the 5 wanted updates (quorum 2)."
    )
