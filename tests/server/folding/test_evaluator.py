"""The coordinator's worker: how long it waits for the code of a task."""

from pathlib import Path
from typing import Any

import pytest

from atoll.server.folding.evaluator import MAIN_TIMEOUT_S, Evaluator, Reference
from tests.wire.test_round import live


@pytest.mark.parametrize(("task", "seconds"), [("module:task", 5.0), ("app/pyproject.toml:app", MAIN_TIMEOUT_S)])
@live
async def test_the_code_of_a_flower_app_may_take_as_long_as_in_flower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, seconds: float
) -> None:
    evaluator = Evaluator(Reference(task, {}), tmp_path / "worker.log", timeout_s=5.0)
    waited: list[float] = []

    def call(op: str, timeout_s: float, **_: Any) -> dict[str, Any]:
        waited.append(timeout_s)
        return {"statistics": {}}

    monkeypatch.setattr(evaluator._worker, "call", call)
    try:
        assert await evaluator.evaluate(tmp_path / "model", 1) == {}
    finally:
        evaluator.close()
    assert waited == [seconds]
