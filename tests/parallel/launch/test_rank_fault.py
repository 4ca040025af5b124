"""The faults of ranks: which of them is behind the others, and which one is the same again."""

from dataclasses import replace

from atoll.parallel.launch.rank_fault import RankFault, cause, take_faults

OWN = RankFault(rank=2, kind="training_failed", detail="Traceback\n  File x, line 3\nKeyError: 'é'", step=7)
LOST = RankFault(rank=0, kind="training_failed", detail="Connection closed by peer", step=7, is_lost_peer=True)


def test_faults_are_taken_once_and_a_rank_s_own_is_the_cause(tmp_path):
    for fault in (LOST, OWN):
        fault.write(tmp_path)
    found = take_faults(tmp_path)
    assert sorted(found, key=lambda fault: fault.rank) == [LOST, OWN]
    assert cause(found) == OWN
    assert take_faults(tmp_path) == []
    assert cause([LOST]) is None


def test_the_same_last_line_at_the_same_step_is_the_same_fault():
    assert OWN.repeats(replace(OWN, rank=0, detail="elsewhere\nKeyError: 'é'"))
    assert not OWN.repeats(None)
    assert not OWN.repeats(replace(OWN, step=8))
    assert not OWN.repeats(replace(OWN, detail="OSError"))
    assert not LOST.repeats(LOST)
