"""The modules that a command imports: what it does not use costs its user seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.protocol.vocabulary import RunId
from atoll.server.config.run import RunConfig
from atoll.server.journal.journal import Journal
from atoll.server.journal.rows import RunRow
from atoll.server.journal.state_directory import StateDirectory
from tests.cli.invoking import invoke
from tests.turns import in_turn
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
APP = str(Path(__file__).parents[1] / "flower" / "apps" / "every_strategy")


def imported(folder: Path, *arguments: str, code: int = 0) -> set[str]:
    """Return the modules that are there when a command ends."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=BOUND_S, cwd=folder
    )
    assert done.returncode == code, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("MODULES ")]
    return set(json.loads(line.removeprefix("MODULES ")))


NUMBERS = ("numpy", "torch")
DATABASE = ("sqlalchemy.dialects.postgresql",)
"""What a showing command does without, though it reads the database."""


LITTLE = (
    (["--help"], 0, ("torch", "numpy", "pydantic", "asyncio", *SERVICE, *PLOTS), 440),
    (["agent", TASK, "--site", "a", "--insecure", "--check"], 0, ("flwr", *PLOTS), 2600),
    (["agent", APP, "--site", "site-0", "--insecure", "--check"], 0, ("flwr", "torch", *PLOTS), 1100),
    (["settings"], 0, (*NUMBERS, *SERVICE, *PLOTS), 502),
    (["privacy", "plan", "--epsilon", "1", "--delta", "1e-5", "--uses", "9"], 0, (*NUMBERS, *SERVICE, *PLOTS), 440),
    (["plugins"], 0, (*NUMBERS, *SERVICE, *PLOTS), 395),
    (["settings", "--json"], 0, (*NUMBERS, *SERVICE, *PLOTS), 502),
    (["run", "list", "--state", "none"], 2, (*NUMBERS, "grpc", "cryptography", *PLOTS), 680),
    (["audit", "verify", "none.log"], 2, ("torch", *PLOTS), 705),
)
"""Commands, their exit codes, modules that they do without, and the most that they have."""


@pytest.mark.parametrize(
    ("arguments", "code", "unused", "most"),
    [in_turn(*values, number=n, days=2, id=" ".join(values[0])) for n, values in enumerate(LITTLE)],
)
def test_a_command_that_computes_nothing_imports_little(
    arguments: list[str], code: int, unused: tuple[str, ...], most: int, tmp_path: Path
) -> None:
    found = imported(tmp_path, *arguments, code=code)
    assert found.isdisjoint(unused), sorted(found & set(unused))
    assert len(found) < most


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the state directory of a run that has no round yet."""
    folder = tmp_path_factory.mktemp("showing")
    with StateDirectory.open(folder / "atoll-state") as directory:
        config = RunConfig(task="task.py:task", name="digits")
        Journal(directory).add_run(RunRow.new(RunId("digits-1"), config, config.rules, 0.0))
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        in_turn(words.split(), number=n, days=2, id=words)
        for n, words in enumerate(("run list", "run show digits-1", "round list", "client list", "model list"))
    ],
)
def test_a_showing_command_reads_the_database_alone(arguments: list[str], state: Path) -> None:
    found = imported(state, *arguments)
    unused = {*NUMBERS, *DATABASE, "grpc", "cryptography", "google.protobuf", *PLOTS}
    assert found.isdisjoint(unused), sorted(found & unused)
    assert len(found) < 680


@pytest.mark.real
def test_a_coordinator_listens_without_torch(tmp_path: Path) -> None:
    """Its worker process imports torch; the coordinator waits for no such import of its own."""
    arguments = ("--state", str(tmp_path / "state"), "--set", "coordinator.listen=127.0.0.1:0")
    command = [sys.executable, "-c", PROGRAM, "coordinator", *arguments, "--insecure", "--stay"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=tmp_path, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert any("atoll coordinator on" in line for line in process.stderr)
        finally:
            process.terminate()
            out, _ = process.communicate(timeout=BOUND_S)
    (line,) = [line for line in out.splitlines() if line.startswith("MODULES ")]
    found = set(json.loads(line.removeprefix("MODULES ")))
    assert found.isdisjoint(("torch", *DATABASE, *PLOTS))
    assert len(found) < 1167


@pytest.mark.parametrize("served", ["atoll.training.worker.operations", "atoll.flower.bench"])
def test_a_worker_needs_torch_for_a_task_of_a_module_alone(served: str) -> None:
    """It would take each site whose task has arrays, or is a Flower app, a second and 200 MB."""
    program = f"import sys, {served}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_first_project_needs_torch_and_numpy_alone(tmp_path: Path) -> None:
    """scikit-learn alone would take a second, half as long as all else together."""
    invoke("new", tmp_path)
    out = str(tmp_path / "o")
    found = imported(tmp_path, "simulate", "task.py:task", "--rounds", "1", "--engine", "sequential", "--out", out)
    assert "torch" in found
    assert found.isdisjoint(("scipy", *PLOTS)), sorted(found & {"scipy", *PLOTS})


def test_a_training_in_one_process_imports_no_compiler(tmp_path: Path) -> None:
    """torch's checkpoints import sharded tensors, and its names of wrapped modules the compiler."""
    out = str(tmp_path / "o")
    found = imported(Path.cwd(), "train", TASK, "--steps", "1", "--out", out)
    unused = {"torch._dynamo", "torch._inductor", "torch.distributed.pipelining", "sqlalchemy", "grpc", *PLOTS[:3]}
    assert "torch" in found
    assert found.isdisjoint(unused), sorted(found & unused)


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
    unused = {*COMPILER, *SHARDS, *PLOTS, "sqlalchemy"}
    assert found.isdisjoint(unused), sorted(found & unused)
