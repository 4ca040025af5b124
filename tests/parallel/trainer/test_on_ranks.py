"""The same training on several ranks, and one that changes from mesh to mesh."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.parallel.checkpoint.store import Store, damage
from atoll.parallel.engine.forked import RankFailed
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.trainer import run as trainer_run
from atoll.parallel.trainer.logs import read_log
from atoll.parallel.trainer.run import Result
from atoll.task.errors import NotFinite
from tests.parallel.ranks import call_on_ranks
from tests.parallel.trainer import tasks
from tests.parallel.trainer.training import CONFIG, mesh, model, on_ranks, run

LAST = 28


def same_model(one: Path, other: Path) -> None:
    expected = model(other)
    assert model(one).keys() == expected.keys()
    for name, value in model(one).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, run(folder)


def test_two_ranks_see_what_one_sees_also_where_the_data_is_uneven(alone: tuple[Path, Result], tmp_path: Path) -> None:
    """52 examples in batches of 8, 13 and 9 to be evaluated: of these no rank has as many as the other."""
    folder, expected = alone
    results = call_on_ranks(on_ranks, 2, tmp_path, mesh(dp_replicate=2))
    assert results[0] == replace(results[1], seconds=results[0].seconds)
    assert tasks.losses(tmp_path) == pytest.approx(tasks.losses(folder), abs=1e-5)
    assert results[0].metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert results[0].metrics[name] == pytest.approx(value, abs=1e-5 if name.endswith("loss") else 0)
    same_model(tmp_path, folder)


BREAKING = replace(CONFIG, checkpoint_every=1, eval_every=100)


def break_on_ranks(folder: Path) -> str:
    broken = replace(tasks.task, loss=tasks.Breaking(12))
    with pytest.raises(NotFinite) as caught:
        run(folder, task=broken, plan=mesh(dp_replicate=2), config=BREAKING)
    return str(caught.value)


def test_a_checkpoint_that_was_being_written_is_complete_before_it_is_called_kept(tmp_path: Path) -> None:
    for message in call_on_ranks(break_on_ranks, 2, tmp_path):
        assert "in step 12 (learning rate 0.2); the checkpoint of step 11 is kept" in message
    store = Store(tmp_path / "checkpoints")
    assert store.latest() == store.path(11)
    assert damage(store.path(11)) == []
    complete = read_log(tmp_path / "log.jsonl", "checkpoint")
    assert sorted(complete) == list(range(1, 12))


def test_a_training_that_is_told_to_stop_on_one_rank_goes_on_under_every_other_mesh(
    alone: tuple[Path, Result], tmp_path: Path
) -> None:
    """The first batch under the pipeline is the short last one of an epoch, and the next ones are longer."""
    folder, expected = alone
    stopped = call_on_ranks(on_ranks, 2, tmp_path, mesh(dp_shard=2), 4, 1)
    assert {result.why for result in stopped} == {"interrupted"}
    assert len({result.steps for result in stopped}) == 1
    assert stopped[0].steps == 4
    run(tmp_path, stop_after=6)
    call_on_ranks(on_ranks, 2, tmp_path, mesh(pp=2), 20, 0)
    end = run(tmp_path)
    assert (end.why, end.steps) == ("finished", LAST)
    assert tasks.losses(tmp_path) == pytest.approx(tasks.losses(folder), abs=1e-5)
    assert end.metrics == pytest.approx(expected.metrics, abs=1e-5)
    same_model(tmp_path, folder)


def odd_on_ranks(folder: Path, plan: Plan, stop_after: int | None = None) -> Result:
    return run(folder, task=tasks.odd, plan=plan, stop_after=stop_after)


def test_a_training_with_a_scalar_and_a_transposed_weight_goes_on_under_every_other_mesh(tmp_path: Path) -> None:
    """Under shards the scalar is a replica, with the shape and the checkpoint of a plain one."""
    one, other = tmp_path / "one", tmp_path / "other"
    run(one, task=tasks.odd)
    call_on_ranks(odd_on_ranks, 2, other, mesh(dp_shard=2), 4)
    run(other, task=tasks.odd, stop_after=8)
    call_on_ranks(odd_on_ranks, 4, other, mesh(dp_replicate=2, dp_shard=2))
    assert tasks.losses(other) == pytest.approx(tasks.losses(one), abs=1e-5)
    same_model(other, one)


def clamped_on_ranks(folder: Path, plan: Plan) -> None:
    run(folder, task=tasks.clamped, plan=plan)


@pytest.mark.parametrize("plan", [mesh(dp_shard=2), mesh(pp=2)], ids=["zero-3", "pp"])
def test_a_weight_that_forward_clamps_is_refused_before_the_first_step(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"TaskBroken: 0\.layer\.weight: forward changes them in place.*parametriz"):
        call_on_ranks(clamped_on_ranks, 2, tmp_path, plan)
    assert not (tmp_path / "checkpoints").exists()


def too_large_on_ranks(folder: Path, name: str, plan: Plan) -> None:
    run(folder, task=getattr(tasks, name), plan=plan)


@pytest.mark.parametrize("plan", [mesh(dp_shard=2), mesh(pp=2), mesh(dp_replicate=2)], ids=["zero-3", "pp", "ddp"])
@pytest.mark.parametrize("name", ["infinite", "too_large"])
def test_a_first_value_that_no_file_holds_is_refused_with_the_way_out(name: str, plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"JobRefused: 0\.scale starts with NaN, infinite values .* persistent=False"):
        call_on_ranks(too_large_on_ranks, 2, tmp_path, name, plan)


def seed_of_a_rank(folder: Path, plan: Plan) -> int:
    on_ranks(folder, plan)
    return torch.initial_seed()


def test_ranks_draw_numbers_of_their_own_along_dp_and_pp(tmp_path: Path) -> None:
    seeds = call_on_ranks(seed_of_a_rank, 4, tmp_path / "both", mesh(pp=2, dp_shard=2))
    assert len(set(seeds)) == 4


def masks_of_a_rank(folder: Path, plan: Plan, stop_after: int) -> dict[int, set[bytes]]:
    """The masks by layer, but those of the trials before the training, and of the pass that infers shapes."""
    trials = trainer_run.try_on_mesh

    def without_masks(*of_training: Any, **options: Any) -> Any:
        found = trials(*of_training, **options)
        tasks.MASKS.clear()
        return found

    trainer_run.try_on_mesh = without_masks  # in this process alone
    run(folder, task=tasks.dropping, plan=plan, stop_after=stop_after)
    return {layer: set(masks[1:]) for layer, masks in tasks.MASKS.items()}


def check_masks(folder: Path, plan: Plan, stop_after: int) -> None:
    """Masks have 32 numbers: two equal ones by chance are one in four thousand millions."""
    found = call_on_ranks(masks_of_a_rank, plan.mesh.size, folder, plan, stop_after)
    of_layers = [set().union(*(masks.get(layer, ()) for masks in found)) for layer in range(5)]
    assert all(of_layers)
    assert sum(map(len, of_layers)) == len(set().union(*of_layers))


@pytest.mark.parametrize(
    ("degree", "settings"),
    [(1, {}), (1, {"recompute": "full"}), (1, {"schedule": "interleaved-1f1b"}), (2, {})],
    ids=["1f1b", "recomputed", "interleaved", "sharded"],
)
def test_no_two_layers_of_a_pipeline_share_a_dropout_mask(
    degree: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    plan = replace(Plan(mesh=Mesh(pp=2, dp_shard=degree)), **settings)
    check_masks(tmp_path, plan, 2)
    check_masks(tmp_path, plan, 3)  # goes on


def test_layers_of_a_pipeline_share_no_mask_after_a_resume_on_another_mesh(tmp_path: Path) -> None:
    run(tmp_path, task=tasks.dropping, stop_after=1)
    check_masks(tmp_path, mesh(pp=2), 3)
