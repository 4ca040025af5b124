"""Rule concatenate in a simulated federation: what is appended, in which order, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from atoll.protocol.settings import ConfigError
from atoll.simulations.engines.engine import ClientFailed
from atoll.task.errors import TaskBroken
from tests.simulations.federation.simulating import TASK as LINES
from tests.simulations.federation.simulating import model, settings, simulate

TASK = str(Path(__file__).with_name("rows_task.py")) + ":"
GIVEN = ("aggregation.rule=concatenate", "rounds=3", "round.cohort_size=4", "round.min_available=4")


def grown(folder, *overrides, task="task", version=3):
    simulate(folder, *GIVEN, *overrides, task=TASK + task)
    return model(folder, version)


def test_each_round_appends_the_rows_of_all_sites_in_the_order_of_their_names(tmp_path):
    found = grown(tmp_path)
    once = [0] * 1 + [1] * 2 + [2] * 3 + [3] * 4
    assert found["who"].tolist() == once * 3
    rounds = [[number, 10.0 * (number - 1)] for number in (1, 2, 3)]
    assert found["what"].tolist() == [row for row in rounds for _ in once]


def test_a_round_without_rows_leaves_the_model_as_it_is(tmp_path):
    found = grown(tmp_path, "local.rows=0")
    assert (found["who"].shape, found["what"].shape) == ((0,), (0, 2))


def test_one_site_in_each_round_is_cyclic_training(tmp_path):
    found = grown(tmp_path, "round.cohort_size=1", f"cohort.sampler={Path(__file__).parent}/rows_sampler.py:in_turn")
    assert found["who"].tolist() == [0] + [1] * 2 + [2] * 3
    assert found["what"][:, 1].tolist() == [0] + [1] * 2 + [3] * 3


SLOW = ("devices.seconds_per_round={low=1.0, high=9.0}", "round.staleness=constant", "rounds=8", "seed=3")


@pytest.mark.parametrize(
    "mode",
    [
        ("round.cohort_size=2", "round.over_selection=2.0", "round.late=next_round", "round.max_staleness=4"),
        ("round.mode=fedbuff", "round.buffer_size=3", "round.concurrency=4"),
    ],
    ids=["late", "fedbuff"],
)
def test_a_late_update_is_appended_once_and_in_order_where_no_discount_is_set(tmp_path, mode):
    given = [each for each in GIVEN if "min_available" not in each and "cohort" not in each]
    simulate(tmp_path, *given, *SLOW, *mode, task=TASK + "task")
    found = model(tmp_path, 8)
    rows = [(who, *map(int, what)) for who, what in zip(found["who"].tolist(), found["what"].tolist(), strict=True)]
    blocks, sizes, left = [], [], list(rows)
    while left:
        who = left[0][0]
        assert left[: who + 1] == [left[0]] * (who + 1)  # whole and together
        blocks.append(left[0])
        sizes.append(len(rows) - len(left))  # rows before it
        left = left[who + 1 :]
    assert len(set(blocks)) == len(blocks)  # each training of each site counts once
    ends = sorted({seen for _, _, seen in blocks if seen})  # the sizes of the versions that somebody has trained from
    by_version = [
        [b for b, size in zip(blocks, sizes, strict=True) if begin <= size < end] for begin, end in pairs(ends)
    ]
    assert all(part == sorted(part, key=lambda block: block[:2]) for part in by_version)
    assert any(seen < begin for begin, part in zip(ends, by_version[1:], strict=False) for _, _, seen in part)  # late


def pairs(ends):
    return list(zip([0, *ends], ends, strict=False))


def test_a_run_that_was_interrupted_goes_on_with_the_same_rows(tmp_path):
    whole, _ = simulate(tmp_path / "whole", *GIVEN, task=TASK + "task")
    simulate(tmp_path / "parts", *GIVEN, "rounds=2", task=TASK + "task")
    parts, _ = simulate(tmp_path / "parts", *GIVEN, task=TASK + "task")
    assert parts["model_digest"] == whole["model_digest"]


def test_a_run_starts_from_the_rows_of_another_one(tmp_path):
    start = {"who": np.array([9, 9], np.uint8), "what": np.ones((2, 2), np.float32)}
    save_file(start, tmp_path / "start.safetensors")
    found = grown(tmp_path / "run", f"model.start={tmp_path}/start.safetensors", "rounds=1", version=1)
    assert found["who"].tolist()[:4] == [9, 9, 0, 1]
    assert found["what"].tolist()[:3] == [[1.0, 1.0], [1.0, 1.0], [1.0, 2.0]]
    save_file({**start, "what": np.ones((2, 3), np.float32)}, tmp_path / "start.safetensors")
    with pytest.raises(ConfigError, match=r"model.start: what is float32 .2, 3., and the model has float32 .0, 2."):
        grown(tmp_path / "other", f"model.start={tmp_path}/start.safetensors")


def test_an_update_beyond_the_limit_is_refused_and_the_others_count(tmp_path):
    """A site appends 9 bytes for each of its rows; two rows are allowed."""
    _, lines = simulate(tmp_path, *GIVEN, "aggregation.append_max=18", "round.quorum=2", task=TASK + "task")
    assert model(tmp_path, 3)["who"].tolist() == [0, 1, 1] * 3
    assert lines[0]["fates"] == {"a": "reported", "b": "reported", "c": "refused", "d": "refused"}


# ---------------------------------------------------------------- refused before anything runs


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ("aggregation.codec=qsgd8", "cannot be combined with codec 'qsgd8'"),
        ("aggregation.norm_bound=1.0", "cannot be combined with norm_bound"),
        ("aggregation.partial=true", "cannot be combined with partial"),
        ("aggregation.weighting=uniform", "cannot be combined with weighting 'uniform'"),
        (
            "aggregation.algorithm=fednova",
            "fednova needs the exact mean, and cannot be combined with rule 'concatenate'",
        ),
        ("aggregation.device=cuda", "device cuda is for the rule mean"),
        ("aggregation.malicious=1", "malicious is not an option of concatenate"),
        ("aggregation.append_max=0", "append_max: got 0; allowed: integer >= 1"),
        ("optimizer.name=fedadam", "optimizer: rule concatenate appends rows, and takes no step"),
        ("schedule.optimizer.lr={kind='cosine', start=0.1, end=0.01}", "takes no step"),
        ("round.late=next_round", "staleness 'polynomial' cannot be combined with rule concatenate"),
        ("round.partial_work=scaled", 'partial_work "scaled" cannot be combined with rule concatenate'),
    ],
)
def test_settings_that_weigh_or_change_rows_are_refused(given, fault):
    with pytest.raises(ConfigError, match=fault):
        settings(*GIVEN, given, task=TASK + "task")


def test_updates_one_by_one_are_no_ensemble():
    given = ("aggregation.rule=concatenate", "round.mode=fedasync", "rounds=3")
    with pytest.raises(ConfigError, match="concatenate is for several updates"):
        settings(*given, task=TASK + "task")


def test_the_limit_is_no_option_of_another_rule():
    with pytest.raises(ConfigError, match="append_max is not an option of mean"):
        settings("aggregation.append_max=5", task=TASK + "task")


@pytest.mark.parametrize(
    ("given", "task", "fault"),
    [
        ("simulation.engine=processes", "task", "simulation.engine: got 'processes': .* allowed: auto, sequential"),
        ("simulation.engine=ray", "task", "simulation.engine: got 'ray'"),
        ("attack.kind=sign_flip", "task", "attack.kind: got 'sign_flip', which forges differences"),
        ("rounds=1", "scalar", "bias has no axis along which rule concatenate could append rows"),
    ],
)
def test_parts_that_cannot_grow_are_refused_by_name(tmp_path, given, task, fault):
    more = ("attack.malicious=1",) if "attack" in given else ()
    with pytest.raises((ConfigError, TaskBroken), match=fault):
        simulate(tmp_path, *GIVEN, given, *more, task=TASK + task)


def test_a_task_of_pytorch_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the tensors of a PyTorch model have fixed shapes: write an ArrayTask"):
        simulate(tmp_path, *GIVEN, task=LINES)


@pytest.mark.parametrize(
    ("task", "fault"), [("wide", "what is F32 .1, 3., expected F32 .1, 2."), ("half", "what is missing")]
)
def test_rows_of_another_shape_are_refused_where_they_are_made(tmp_path, task, fault):
    with pytest.raises(ClientFailed, match=fault):
        simulate(tmp_path, *GIVEN, task=TASK + task)
