"""The modules that a command imports: what it does not use costs its user seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import BOUND_S

PROGRAM = """
import atexit, json, sys
atexit.register(lambda: print("MODULES", json.dumps(sorted(sys.modules))))
from atoll.cli.main import run
run()
"""
COMPILER = ("torch._dynamo", "torch._inductor", "sympy")
SHARDS = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint")
PLOTS = ("matplotlib", "pandas", "sklearn", "tensorboard")
SERVICE = ("grpc", "sqlalchemy")
TASK = "tests.odd_tasks.tasks.base:plain"


def imported(folder: Path, *arguments: str, code: int = 0) -> set[str]:
    """Return the modules that are there when a command ends."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=BOUND_S, cwd=folder
    )
    assert done.returncode == code, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("MODULES ")]
    return set(json.loads(line.removeprefix("MODULES ")))


@pytest.mark.parametrize(
    ("arguments", "code", "unused", "most"),
    [
        (["--help"], 0, ("torch", "numpy", "pydantic", *SERVICE, *PLOTS), 460),
        (["settings"], 0, ("torch", *SERVICE, *PLOTS), 700),
        (["plugins"], 0, ("torch", *SERVICE, *PLOTS), 700),
        (["settings", "--json"], 0, ("torch", *SERVICE, *PLOTS), 700),
        (["run", "list", "--state", "none"], 2, ("torch", *PLOTS), 1000),
        (["audit", "verify", "none.log"], 2, ("torch", *PLOTS), 1000),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_that_computes_nothing_imports_little(
    arguments: list[str], code: int, unused: tuple[str, ...], most: int, tmp_path: Path
) -> None:
    found = imported(tmp_path, *arguments, code=code)
    assert found.isdisjoint(unused), sorted(found & set(unused))
    assert len(found) < most


def test_a_simulation_imports_neither_the_compiler_nor_sharded_tensors(tmp_path: Path) -> None:
    arguments = (
        "--rounds",
        "1",
        "--engine",
        "sequential",
        "--set",
        "round.cohort_size=2",
        "--out",
        str(tmp_path / "o"),
    )
    found = imported(Path.cwd(), "simulate", TASK, *arguments)
    assert "torch" in found
    assert found.isdisjoint((*COMPILER, *SHARDS, *PLOTS)), sorted(found & {*COMPILER, *SHARDS, *PLOTS})
