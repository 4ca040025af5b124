"""The contracts of imports, held against made-up imports in a copy of the package."""

import shutil
from itertools import permutations

import pytest

from tests.house.contracts import broken, floors, may_import
from tests.house.tree import ROOMS, ROOT

VIOLATIONS = [
    ("tensors/layout.py", "from atoll.aggregation.fold import streaming", "aggregation.fold.streaming"),
    ("aggregation/fold/streaming.py", "import atoll.task.task", "task.task"),
    ("aggregation/rules/rule.py", "if TYPE_CHECKING:\n    from atoll.aggregation import fold", "aggregation.fold"),
    ("task/task.py", "from atoll.training.worker.bench import Bench", "training.worker.bench"),
    ("training/worker/process.py", "from atoll.parallel.world import World", "parallel.world"),
    ("flower/task.py", "from atoll.protocol.vocabulary import Digest", "protocol.vocabulary"),
    ("protocol/manifest.py", "from atoll import Task", ""),
    ("server/services/coordinator_service.py", "from atoll.client.config import AgentConfig", "client.config"),
    ("client/agent.py", "import atoll.server.errors", "server.errors"),
    ("server/journal/codec.py", "def f():\n    import atoll.server.hosting.judge", "server.hosting.judge"),
    ("server/statistics/merging.py", "from atoll.server.rounds.policy import Mode", "server.rounds.policy"),
    ("simulations/federation/run.py", "from atoll.cli.main import run", "cli.main"),
    ("cli/runs/runs.py", "from atoll.interface import tables", "interface.tables"),
    ("interface/tables.py", "from atoll.cli import printing", "cli.printing"),
    ("operations/load.py", "from atoll.cli import printing", "cli.printing"),
    ("cli/printing.py", "from atoll.cli import main", "cli.main"),
    ("server/errors.py", "from atoll.server import clock", "server.clock"),
]


CIRCLE = ("server/rounds/one_sum.py", "def f():\n    from atoll.server.rounds import secure_round", "")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what import-linter says of all of them at once, and of a file and a folder without a place."""
    root = tmp_path_factory.mktemp("house")
    shutil.copytree(ROOT / "atoll", root / "atoll")
    shutil.copy(ROOT / "pyproject.toml", root)
    for path, source, _ in [*VIOLATIONS, CIRCLE]:
        with (root / "atoll" / path).open("a") as file:
            file.write(f"\n{source}\n")
    for path in ("server/fresh.py", "server/new/__init__.py", "fresh.py"):
        (root / "atoll" / path).parent.mkdir(exist_ok=True)
        (root / "atoll" / path).touch()
    return " ".join(broken(root).split())


@pytest.mark.parametrize(("path", "source", "imported"), VIOLATIONS)
def test_an_import_that_runs_up_or_across_is_found(told: str, path: str, source: str, imported: str) -> None:
    importer = path.removesuffix(".py").replace("/", ".")
    assert f"atoll.{importer} -> atoll{imported and f'.{imported}'} " in told


@pytest.mark.parametrize("name", ["atoll.fresh", "atoll.server.fresh", "atoll.server.new"])
def test_a_file_or_folder_without_a_place_is_found(told: str, name: str) -> None:
    assert f"- {name} " in told


def test_a_circle_is_found(told: str) -> None:
    assert "No cycles are allowed in atoll.server.rounds." in told
    assert any(f"- .{one} -> .{other} (1 import)" in told for one, other in permutations(("one_sum", "secure_round")))


def test_a_room_may_import_what_is_below_and_not_forbidden() -> None:
    assert may_import("ground") == set()
    assert may_import("aggregation") == {"tensors", "plugins", "ground"}
    assert may_import("atoll") == set(ROOMS) - {"atoll"}
    assert floors("server")[0] == ["clock", "errors", "invariants", "process_tuning"]
