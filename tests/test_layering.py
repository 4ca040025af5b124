"""Arrows point down only: between rooms, between the floors of a room, and nowhere in a circle; and pure is pure.

The tables are in `tests/house`: `floors.py` has the rooms and their floors, `purity.py` the pure folders.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.house.__main__ import HOUSE
from tests.house.floors import APART, MAY_IMPORT, WITHOUT_SHELL
from tests.house.imports import Edge, edges, folder_circles, imported_names, module_circles
from tests.house.purity import Purity, absent_places, impure_imports
from tests.house.tree import AROUND, ROOMS, ROOT, TESTS, Module, read
from tests.house.upward import missing_places, upward_imports

SHIPPED = read(ROOT, ROOMS)
EVERYTHING = [*SHIPPED, *read(ROOT, AROUND), *read(ROOT, [TESTS])]

MONOTONIC = {
    "parallel/mesh_client/supervisor/crew.py",
    "parallel/mesh_client/main.py",
    "parallel/mesh_client/orders.py",
    "parallel/mesh_client/supervisor/shared_folder.py",
    "parallel/mesh_client/supervisor/terms.py",
    "parallel/engine/forked.py",
    "parallel/launch/line.py",
    "parallel/launch/meeting.py",
    "training/worker/inbox.py",
    "training/worker/main.py",
    "training/worker/process.py",
}
"""The only files of the ground floor that may read a clock: the monotonic one."""

BARE = set(ROOMS) - {"atoll"}


def test_no_import_runs_up_a_floor_or_to_a_room_above() -> None:
    assert upward_imports(HOUSE, edges(SHIPPED)) == []


def test_every_folder_and_every_file_of_a_room_has_its_floor() -> None:
    assert missing_places(HOUSE, [module.path for module in SHIPPED], edges(SHIPPED)) == []


def test_no_import_circle_anywhere() -> None:
    assert module_circles(edges(EVERYTHING)) == []


def test_no_circle_of_folders() -> None:
    places = {module.path: HOUSE.place(module.path) for module in SHIPPED}
    assert folder_circles(edges(SHIPPED), places) == []


def test_the_command_line_and_the_python_interface_do_not_import_each_other() -> None:
    assert [edge for edge in edges(SHIPPED) if is_across(edge)] == []


@pytest.mark.parametrize("folders", [("cli", "interface"), ("interface", "cli")])
def test_an_import_of_the_other_one_is_found(folders: tuple[str, str]) -> None:
    importer = Module(f"atoll/{folders[0]}/x.py", f"def f():\n    from atoll.{folders[1]} import y")
    imported = Module(f"atoll/{folders[1]}/y.py", "")
    assert [is_across(edge) for edge in edges([importer, imported])] == [True]


def is_across(edge: Edge) -> bool:
    """Whether an import leads from one folder of `APART` to another."""
    return {"/".join(path.split("/")[:2]) for path in (edge.importer, edge.imported)} == APART


def test_operations_print_nothing() -> None:
    operations = [module for module in SHIPPED if module.path.startswith("atoll/operations/")]
    assert operations
    for module in operations:
        names = [name for _, name in imported_names(module)]
        called = {ast.unparse(node.func) for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
        assert not [name for name in names if within(name, {"typer", "click", "rich"})], module.path
        assert not called & {"print", "sys.stdout.write", "sys.stderr.write", "os.write"}, module.path


def test_pure_folders_import_nothing_that_acts() -> None:
    assert impure_imports(Purity(), SHIPPED) == []
    assert absent_places(Purity(), [module.path for module in SHIPPED]) == []


def test_names_are_full_and_the_ground_floor_knows_no_network_and_no_clock() -> None:
    assert [fault for module in EVERYTHING for fault in faults_of(module)] == []


def faults_of(module: Module) -> list[str]:
    """Return the imports of a file that no file, or none on its floor, may have."""
    names = [name for _, name in imported_names(module)]
    relative = [node.lineno for node in module.statements if isinstance(node, ast.ImportFrom) and node.level]
    faults = [f"{module.path}:{line}: a relative import" for line in relative]
    faults += [f"{module.path}: {name} is imported by its bare name" for name in names if within(name, BARE)]
    if module.room in BARE:
        faults += [f"{module.path}: the command line is above" for name in names if within(name, {"atoll.cli"})]
        faults += [f"{module.path}: {name} is the root's" for name in names if is_of_the_root(name)]
    if module.room in WITHOUT_SHELL:
        used = [*names, *clocks(module.tree)]
        faults += [f"{module.path}: {name} on the ground floor" for name in used if is_shell(name, module.path)]
    return faults


def within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def is_of_the_root(name: str) -> bool:
    """Whether a room takes a name from the root package: `from atoll import Task`."""
    if not name.startswith("atoll.") or name == "atoll.__version__":
        return False
    return name.split(".")[1] not in {*BARE, "cli"}


def is_shell(name: str, path: str) -> bool:
    if within(name, {"time"}):
        return name != "time" and not (name == "time.monotonic" and path in MONOTONIC)
    return within(name, {"grpc", "asyncio", "datetime"}) and name != "datetime.timedelta"


def clocks(tree: ast.AST) -> Iterator[str]:
    """Yield `time.x` wherever it is used, under whatever name: importing `time` does not say which clock is read."""
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names = {alias.asname or alias.name for alias in aliases if alias.name == "time"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            yield f"time.{node.attr}"


def violations(path: str, source: str) -> list[object]:
    """Return all faults of one made-up file among the real ones."""
    module = Module(path, source)
    others = [known for known in SHIPPED if known.path != path]
    found = [edge for edge in edges([*others, module]) if edge.importer == path]
    return [*faults_of(module), *upward_imports(HOUSE, found), *impure_imports(Purity(), [module])]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("aggregation/fold/streaming.py", "from atoll.protocol.vocabulary import Digest"),
        ("aggregation/fold/streaming.py", "import atoll.task.task"),
        ("aggregation/fold/streaming.py", "import grpc.aio"),
        ("aggregation/fold/streaming.py", "def f():\n    import asyncio"),
        ("aggregation/fold/streaming.py", "import time\nnow = time.time()"),
        ("aggregation/fold/streaming.py", "import time\nnow = time.monotonic()"),
        ("aggregation/fold/streaming.py", "import time as clock\nnow = clock.time()"),
        ("aggregation/fold/streaming.py", "from time import monotonic"),
        ("aggregation/fold/streaming.py", "from datetime import datetime"),
        ("tensors/layout.py", "from atoll.aggregation.fold.streaming import fold"),
        ("aggregation/rules/rule.py", "if TYPE_CHECKING:\n    from atoll.aggregation.fold import streaming"),
        ("training/worker/process.py", "import time\nnow = time.time()"),
        ("task/task.py", "from atoll.aggregation.fold.streaming import fold"),
        ("task/task.py", "from atoll.aggregation.fold import streaming"),
        ("task/task.py", "from atoll.training.worker.bench import Bench"),
        ("protocol/manifest.py", "from atoll.server.rounds.policy import StragglerPolicy"),
        ("protocol/manifest.py", "from atoll.server import errors"),
        ("protocol/manifest.py", "from atoll import Task"),
        ("server/services/coordinator_service.py", "from atoll.client.config import AgentConfig"),
        ("server/rounds/run_machine.py", "from atoll.server.journal import codec"),
        ("server/journal/codec.py", "def f():\n    from atoll.server.hosting import coordinator"),
        ("client/agent.py", "import atoll.server.errors"),
        ("server/services/coordinator_service.py", "if True:\n    from atoll.simulations.devices import client_draws"),
        ("simulations/federation/run.py", "from atoll.cli.main import run"),
        ("server/process.py", "from atoll import cli"),
        ("server/process.py", "from . import clock"),
        ("server/process.py", "from ..client import agent"),
        ("server/process.py", "import server.clock"),
        ("tests/test_x.py", "from client import agent"),
        ("atoll/cli/main.py", "from .. import protocol"),
        ("server/rounds/cohort_round.py", "import time"),
        ("server/rounds/cohort_round.py", "from pathlib import Path"),
        ("server/rounds/cohort_round.py", "import pydantic"),
        ("server/rounds/cohort_round.py", "import numpy as np"),
        ("server/rounds/cohort_round.py", "from atoll.protocol.settings import load"),
        ("client/session/session.py", "from os import urandom"),
    ],
)
def test_the_check_bites(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "aggregation/fold/streaming.py",
            "from atoll.tensors.layout import Piece\nimport numpy\nimport torch.distributed",
        ),
        ("training/worker/process.py", "import time\nnow = time.monotonic()"),
        ("task/task.py", "from atoll.tensors import safetensors_file"),
        ("protocol/wire/channel.py", "import grpc\nfrom atoll.protocol.settings import ConfigError"),
        (
            "server/process.py",
            "import asyncio\nfrom atoll.aggregation.fold import streaming\nfrom atoll import __version__",
        ),
        ("client/agent.py", "from atoll.task.task import Task\nfrom atoll.protocol import atoll_pb2"),
        (
            "simulations/federation/run.py",
            "from atoll.server.rounds import cohort_round\nfrom atoll.client.session.session import Session",
        ),
        ("server/rounds/policy.py", "from pydantic import BaseModel\nfrom collections.abc import Mapping"),
        (
            "server/rounds/cohort_round.py",
            "from atoll.server.rounds.policy import StragglerPolicy\nfrom atoll.protocol import vocabulary",
        ),
        ("atoll/cli/main.py", "from atoll.server.config.run import RunFile"),
        ("tests/server/test_x.py", "from tests.server import histories"),
    ],
)
def test_the_check_lets_through_what_is_allowed(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_each_room_has_its_table() -> None:
    assert set(MAY_IMPORT) == set(ROOMS) == set(HOUSE.floors)
