"""The figures of the lecture and of the papers."""

import pytest

from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.planner.accounting import ACCOUNTINGS, TRAFFIC, activations, states
from atoll.parallel.planner.candidate import Candidate
from atoll.parallel.planner.memory import memory, worst
from atoll.parallel.planner.shape import MODELS

GB, GIB = 1e9, 2**30


def test_the_lecture_s_gpt_2_has_6_and_6_and_18_gb_and_56_gib_of_activations() -> None:
    candidate = Candidate(plan=Plan(), microbatch=32)
    found = memory(MODELS["gpt2-xl"], candidate, counted="lecture")
    assert (found.parameters / GB, found.gradients / GB, found.optimizer / GB) == (6, 6, 18)
    assert found.activations / GIB == 56.25
    assert found.activations / GIB == pytest.approx(56.43, rel=4e-3)  # the slide's figure
    assert found.states / GB + found.activations / GIB == pytest.approx(87, rel=1e-2)  # its total mixes GB with GiB
    assert found.total / GB == pytest.approx(90.4, abs=0.05)  # in one unit


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("bert-large", 5.12), ("gpt2-xl", 24), ("turing-nlg", 275.2), ("gpt3", 2800)]
)
def test_the_footprints_at_16_bytes_a_parameter(name: str, gigabytes: float) -> None:
    found = memory(MODELS[name], Candidate(), counted="zero-paper")
    assert found.states / GB == pytest.approx(gigabytes)


def test_zero_s_figure_1() -> None:
    """7.5 B parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB (Rajbhandari et al. 2020)."""
    found = [
        sum(states(7.5e9, ACCOUNTINGS["zero-paper"], zero=zero, num_ranks=64 if zero else 1)) / GB for zero in range(4)
    ]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_zero_s_reductions_in_the_limit_are_4_and_8_and_n_times() -> None:
    n = 10**6
    whole, *rest = (sum(states(1.0, ACCOUNTINGS["zero-paper"], zero=zero, num_ranks=n)) for zero in range(4))
    assert [whole / sharded for sharded in rest] == pytest.approx([4, 8, n], rel=1e-4)
    assert [TRAFFIC[zero] / TRAFFIC[0] for zero in (1, 2, 3)] == [1, 1, 1.5]


def test_gpt_3_on_64_devices_as_4_x_4_x_4() -> None:
    """Tensor and pipeline parallelism leave 175 GB a device; with ZeRO over the copies 76.6, at best 43.75."""
    found = {
        zero: memory(
            MODELS["gpt3"],
            Candidate(
                plan=Plan(mesh=Mesh(pp=4, dp_replicate=1 if zero else 4, dp_shard=4 if zero else 1, tp=4), zero=zero)
            ),
            counted="zero-paper",
        ).states
        / GB
        for zero in (0, 1, 3)
    }
    assert found == pytest.approx({0: 175, 1: 76.6, 3: 43.75}, rel=1e-3)


def test_what_the_engine_holds_of_it_is_16_bytes_of_fp32_shards() -> None:
    """Masters, gradients and two moments in fp32 under every stage of ZeRO; 174.6 B parameters are not 175 B."""
    mesh = Mesh(pp=4, dp_shard=4, tp=4)
    for zero in (1, 2, 3):
        plan = Plan(mesh=mesh, zero=zero, precision="bf16", num_microbatches=32)
        assert worst(MODELS["gpt3"], Candidate(plan=plan)).states / GB == pytest.approx(43.75, rel=2e-2)


def test_activations_have_12_elements_of_two_bytes_for_each_place_in_a_layer() -> None:
    shape = MODELS["gpt2-xl"]
    assert activations(shape, 1) == 2 * 12 * 1600 * 1024 * 48
