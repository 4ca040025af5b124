"""Odd models on a mesh as a client, beside those of `tests/odd_tasks`: as in one process, or refused."""

from pathlib import Path

import pytest

from atoll.parallel.engine.forked import RankFailed
from tests.parallel.mesh_client.clients import (
    Json,
    distance,
    evaluated_in_one_process,
    evaluated_on_a_rank,
    in_one_process,
    on_a_mesh,
    request_of,
    write_version,
)
from tests.parallel.ranks import call_on_ranks

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    "options",
    [{"dp_replicate": 2}, *(pytest.param(each, marks=pytest.mark.long) for each in ({"dp_shard": 2}, {"dp_shard": 3}))],
    ids=str,
)
def test_a_buffer_that_follows_a_ranks_own_examples_is_named(options: Json, tmp_path: Path) -> None:
    write_version(tmp_path, "following")
    with pytest.raises(RankFailed, match="mean: a pass leaves values there that depend on its examples"):
        on_a_mesh(tmp_path, options, name="following")


@pytest.mark.parametrize("name", ["counting_passes", "twice_registered"])
@pytest.mark.parametrize(
    "options", [pytest.param({"dp_replicate": 2}, marks=pytest.mark.long), {"dp_shard": 3}], ids=str
)
def test_what_does_not_depend_on_a_ranks_examples_is_that_of_one_process(
    name: str, options: Json, tmp_path: Path
) -> None:
    write_version(tmp_path, name)
    expected, update = in_one_process(tmp_path, name=name)
    answer, found = on_a_mesh(tmp_path, options, name=name)
    assert distance(found, update) < 1e-6
    assert answer["description"] == expected["description"]


OWN = [{"dp_replicate": 2}, {"dp_shard": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}]


@pytest.mark.parametrize("options", [pytest.param(each, marks=[pytest.mark.long] * (each != OWN[1])) for each in OWN])
def test_an_own_optimizer_that_moves_each_element_steps_shards(options: Json, tmp_path: Path) -> None:
    write_version(tmp_path, "own_optimizer")
    _, update = in_one_process(tmp_path, name="own_optimizer")
    _, found = on_a_mesh(tmp_path, options, name="own_optimizer")
    assert distance(found, update) < 1e-6


def test_a_pass_that_changes_a_buffer_is_refused_where_a_step_has_several(tmp_path: Path) -> None:
    write_version(tmp_path, "counting_passes")
    with pytest.raises(RankFailed, match="mean: each forward pass changes them, and a step has 2 passes"):
        on_a_mesh(tmp_path, {"dp_replicate": 2, "accumulate": 2}, name="counting_passes")


@pytest.mark.parametrize("options", [{"pp": 2}, pytest.param({"dp_shard": 2}, marks=pytest.mark.long)], ids=str)
def test_a_site_without_training_examples_describes_itself_and_evaluates(options: Json, tmp_path: Path) -> None:
    name = "without_training_data"
    write_version(tmp_path, name)
    request = request_of(tmp_path, "out", op="evaluate", split="test")
    described, evaluated = evaluated_in_one_process(name, request)
    found = call_on_ranks(evaluated_on_a_rank, 2, name, options, request)[0]
    assert described["num_examples"] == 0
    assert found[0] == {key: described[key] for key in found[0]}
    assert found[1]["statistics"]["loss"] == pytest.approx(evaluated["statistics"]["loss"], rel=5e-6)
