"""The use of a mesh: the utilization where both numbers are known, the reason where not, and no number out of range."""

import math
from dataclasses import asdict, replace

import pytest

from atoll.protocol.wire.mesh_use import MeshUse

USE = MeshUse(num_ranks=4, peak_bytes=2 * 10**9, steps_per_s=2.5, flops_per_s=4e12, peak_flops=1e13)


def test_the_utilization_is_known_where_both_numbers_are():
    assert USE.mfu == 0.4
    assert str(USE) == "4 ranks, 2.5 steps/s, at most 2.0 GB of memory on a rank, MFU 40.0%"
    assert USE.document["mfu"] == 0.4
    assert USE.document["why_no_mfu"] == ""


def test_a_device_without_a_known_peak_has_operations_alone():
    found = replace(USE, peak_flops=0.0)
    assert found.document["mfu"] is None
    assert found.document["why_no_mfu"] == "the peak of these devices is not known"
    assert str(found).endswith("on a rank, 4e+03 GFLOP/s")


def test_a_model_that_does_not_run_without_values_has_neither():
    found = replace(USE, flops_per_s=0.0, peak_bytes=0)
    assert str(found) == "4 ranks, 2.5 steps/s"
    assert found.why_no_mfu.startswith("the operations of the model are not known")
    assert (found.document["flops_per_s"], found.document["peak_bytes"]) == (None, None)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, 1e40])
def test_numbers_out_of_range_are_not_known(wrong):
    found = MeshUse.read(**asdict(replace(USE, flops_per_s=wrong, steps_per_s=wrong)))
    assert found == replace(USE, flops_per_s=0.0, steps_per_s=0.0)


@pytest.mark.parametrize("ranks", [0, 2**31])
def test_a_mesh_without_ranks_is_none(ranks):
    assert MeshUse.read(**asdict(replace(USE, num_ranks=ranks))) is None
    assert MeshUse.read(**asdict(USE)) == USE
