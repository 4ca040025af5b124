"""All odd tasks in one process group: what a mesh trains is the update of one process, and it refuses the rest."""

from pathlib import Path
from typing import Any

import pytest

from tests.odd_tasks.on_a_mesh import NAMES, verdicts

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp_replicate=2": {"dp_replicate": 2},
    "dp_shard=2": {"dp_shard": 2},
    "dp_shard=3": {"dp_shard": 3},
    "accumulate=2": {"dp_shard": 2, "accumulate": 2},
    "zero=2": {"dp_shard": 2, "zero": 2},
}
SOME = [
    *("clamped", "list_targets", "text_targets", "borrowed_weights", "routed_experts"),
    *("masked_targets", "short_counter", "bool_buffer", "batch_norm"),
]


@pytest.mark.real
def test_some_odd_tasks_on_a_mesh_are_equal_to_one_process_or_refused(tmp_path: Path) -> None:
    assert verdicts({"dp_shard": 2}, tmp_path, SOME) == {}


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_odd_task_on_a_mesh_is_equal_to_one_process_or_refused(layout: str, tmp_path: Path) -> None:
    assert verdicts(LAYOUTS[layout], tmp_path, NAMES) == {}
