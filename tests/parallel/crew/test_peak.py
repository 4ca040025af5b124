"""The largest memory of a rank in a round: that of a tensor which is gone, and not of an earlier round."""

import torch

from atoll.parallel.crew.peak import PeakMemory

MIB = 2**20


def test_the_peak_is_seen_after_it_is_gone_and_forgotten_in_the_next_round():
    cpu = torch.device("cpu")
    peak = PeakMemory(cpu)
    before = peak.num_bytes
    assert before > MIB
    block = torch.ones(64 * MIB // 4)
    assert block.sum() > 0
    del block
    assert 60 * MIB < peak.num_bytes - before < 96 * MIB
    assert PeakMemory(cpu).num_bytes < before + 32 * MIB


def test_without_proc_there_is_no_figure(tmp_path):
    assert PeakMemory(torch.device("cpu"), tmp_path / "none").num_bytes == 0
