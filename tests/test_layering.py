"""Arrows point down only: the house of the design's second section, read from the imports of every file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

GROUND = {"aggregation", "parallel"}
MAY_IMPORT = {
    "aggregation": {"aggregation"},
    "parallel": {"parallel"},
    "protocol": {"protocol"} | GROUND,
    "server": {"server", "protocol"} | GROUND,
    "client": {"client", "protocol"} | GROUND,
    "simulations": {"simulations", "server", "client", "protocol"} | GROUND,
}
"""The rooms that each room may import."""

ALSO = {
    "parallel": {
        "atoll.aggregation.codecs.names",
        "atoll.aggregation.tensors.pieces",
        "atoll.aggregation.updates.encoded_writer",
        "atoll.aggregation.folders",
        "atoll.aggregation.tensors.layout",
        "atoll.aggregation.tensors.safetensors_file",
    }
}
"""What the ground floor shares: where numbers lie, the file that they lie in, and what they are encoded with there."""

PURE = {
    "aggregation/fold/weights.py",
    "protocol/audit/recovery.py",
    "protocol/identity/names.py",
    "protocol/value_type.py",
    "protocol/vocabulary.py",
    "server/rounds/update_claims.py",
    "server/backup/contents.py",
    "server/rounds/buffer_round.py",
    "server/rounds/client_evaluation.py",
    "server/rounds/events.py",
    "server/identity/rules.py",
    "server/rounds/update_intake.py",
    "server/rounds/async_invitations.py",
    "server/rounds/leases.py",
    "server/rounds/ledger.py",
    "server/rounds/member.py",
    "server/rounds/membership.py",
    "server/selection/oort.py",
    "server/rounds/member_pages.py",
    "server/rounds/open_round.py",
    "server/rounds/oort_pacer.py",
    "server/rounds/policy.py",
    "server/selection/weighted_draws.py",
    "server/rounds/record.py",
    "server/rounds/candidate_index.py",
    "server/rounds/cohort_round.py",
    "server/rounds/run_machine.py",
    "server/selection/sampling.py",
    "server/rounds/oort_utility.py",
    "client/session/events.py",
    "client/policy/content.py",
    "client/policy/disclosure.py",
    "client/session/session.py",
    "client/session/rollback_rules.py",
}
"""Files that know no clock, socket, file or randomness but what they are handed."""

PURE_STDLIB = {
    "abc",
    "bisect",
    "collections",
    "contextlib",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "operator",
    "random",
    "typing",
}
PURE_ALSO = {
    "client/policy/content.py": {"json"},
    "protocol/audit/recovery.py": {"atoll.protocol.audit.chain", "mmap", "re"},  # it is handed a file's bytes, mapped
    "protocol/identity/names.py": {"re"},
    "server/backup/contents.py": {"pydantic", "re"},
    "server/rounds/policy.py": {"pydantic"},
    "server/selection/sampling.py": {
        "atoll.protocol.reference",
        "atoll.protocol.settings",
    },  # load_sampler finds a user's own
}

MONOTONIC = {"parallel/engine/forked.py", "parallel/worker/process.py", "parallel/worker/main.py"}
"""The only files of the ground floor that may read a clock: the monotonic one."""


def imported(tree: ast.AST) -> Iterator[str]:
    """Full dotted names of everything that is imported anywhere in the file; relative ones begin with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def violations(path: str, source: str) -> list[str]:
    """What the file at `path` (from the root, such as server/rounds/cohort_round.py) imports and must not."""
    room = path.split("/")[0]
    tree = ast.parse(source)
    names = sorted(set(imported(tree)))
    faults = [f"{path}: relative import {name}" for name in names if name.startswith(".")]
    faults += [f"{path}: {name} is imported by its bare name" for name in names if within(name, set(MAY_IMPORT))]
    if room in MAY_IMPORT:
        faults += [f"{path}: {name} is above" for name in names if is_above(name, room)]
    if room in GROUND:
        faults += [f"{path}: {name} on the ground floor" for name in [*names, *clocks(tree)] if is_shell(name, path)]
    if path in PURE:
        faults += [f"{path}: {name} is not pure" for name in names if not is_pure(name, path)]
    return faults


def is_above(name: str, room: str) -> bool:
    """Whether a file of `room` reaches for something of ours that is not its own floor's or below."""
    if name in ("atoll", "atoll.__version__") or not name.startswith("atoll."):
        return False
    return name.split(".")[1] not in MAY_IMPORT[room] and not within(name, ALSO.get(room, set()))


def is_shell(name: str, path: str) -> bool:
    if within(name, {"time"}):
        return name != "time" and not (name == "time.monotonic" and path in MONOTONIC)
    return within(name, {"grpc", "asyncio", "datetime"}) and name != "datetime.timedelta"


def clocks(tree: ast.AST) -> Iterator[str]:
    """`time.x` wherever it is used, under whatever name: importing `time` says not yet which clock is read."""
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names = {alias.asname or alias.name for alias in aliases if alias.name == "time"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            yield f"time.{node.attr}"


def is_pure(name: str, path: str) -> bool:
    if within(name, PURE_STDLIB | PURE_ALSO.get(path, set())):
        return True
    return within(name, {f"atoll.{file.removesuffix('.py').replace('/', '.')}" for file in PURE})


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in path.name]


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_what_is_below_it(room: str) -> None:
    checked = files(room)
    assert checked, f"no files in {room}"
    faults = [f for path in checked for f in violations(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))]
    assert faults == []


def test_everything_else_uses_full_names_too() -> None:
    outside = [path for path in sorted((ROOT / "atoll").rglob("*.py")) if path.resolve() == path]
    outside += files("benchmarks", "examples", "tests")
    faults = [f for path in outside for f in violations(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))]
    assert faults == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("aggregation/fold/streaming.py", "from atoll.protocol.vocabulary import Digest"),
        ("aggregation/fold/streaming.py", "import atoll.parallel.task.task"),
        ("aggregation/fold/streaming.py", "import grpc.aio"),
        ("aggregation/fold/streaming.py", "def f():\n    import asyncio"),
        ("aggregation/fold/streaming.py", "import time\nnow = time.time()"),
        ("aggregation/fold/streaming.py", "import time\nnow = time.monotonic()"),
        ("aggregation/fold/streaming.py", "import time as clock\nnow = clock.time()"),
        ("aggregation/fold/streaming.py", "from time import monotonic"),
        ("aggregation/fold/streaming.py", "from datetime import datetime"),
        ("parallel/worker/process.py", "import time\nnow = time.time()"),
        ("parallel/task/task.py", "from atoll.aggregation.fold.streaming import fold"),
        ("parallel/task/task.py", "from atoll.aggregation import fold"),
        ("protocol/manifest.py", "from atoll.server.rounds.policy import StragglerPolicy"),
        ("protocol/manifest.py", "from atoll import server"),
        ("protocol/manifest.py", "from atoll import Task"),
        ("server/services/coordinator_service.py", "from atoll.client.config import AgentConfig"),
        ("client/process.py", "import atoll.server"),
        ("server/services/coordinator_service.py", "if True:\n    from atoll.simulations import clock"),
        ("simulations/clock.py", "from atoll.cli.main import run"),
        ("server/services/coordinator_service.py", "from atoll import cli"),
        ("server/services/coordinator_service.py", "from . import policy"),
        ("server/services/coordinator_service.py", "from ..client import agent"),
        ("server/services/coordinator_service.py", "import server.policy"),
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
            "from atoll.aggregation.tensors.layout import Piece\nimport numpy\nimport torch.distributed",
        ),
        ("parallel/worker/process.py", "import time\nnow = time.monotonic()"),
        (
            "parallel/task/task.py",
            "from atoll.aggregation import tensorfile\nfrom atoll.aggregation.tensors.layout import Tensor",
        ),
        ("protocol/wire/channel.py", "import grpc\nfrom atoll.protocol.settings import ConfigError"),
        (
            "server/services/coordinator_service.py",
            "import asyncio\nfrom atoll.aggregation.fold.streaming import fold\nfrom atoll import __version__",
        ),
        ("client/process.py", "from atoll.parallel.task.task import Task\nfrom atoll.protocol import atoll_pb2"),
        (
            "simulations/run.py",
            "from atoll.server.rounds.cohort_round import Round\nfrom atoll.client.session.session import Session",
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
