"""Floors of a made-up house."""

import pytest

from tests.house.floors import FLOORS, MAY_IMPORT
from tests.house.imports import edges
from tests.house.propose import proposal
from tests.house.tree import ROOMS, Fault, Module
from tests.house.upward import House, missing_places, upward_imports

HOUSE = House(
    floors={
        "tensors": (("layout.py",),),
        "aggregation": (("fold",),),
        "server": (("errors.py",), ("rounds", "views"), ("rounds/late.py", "rounds/deep"), ("process.py",)),
        "atoll": (("__init__.py",),),
    },
    may_import={
        "tensors": {"tensors"},
        "aggregation": {"aggregation", "tensors"},
        "parallel": {"parallel", "tensors"},
        "server": {"server", "aggregation"},
        "atoll": {"atoll", "server", "aggregation"},
    },
)
PLACES = [
    "server/__init__.py",
    "server/errors.py",
    "server/process.py",
    "server/rounds/__init__.py",
    "server/rounds/late.py",
    "server/rounds/other.py",
    "server/rounds/policy.py",
    "server/rounds/deep/run.py",
    "server/views/run.py",
    "tensors/layout.py",
    "aggregation/fold/grid.py",
    "aggregation/fold/means.py",
    "parallel/plan.py",
    "atoll/__init__.py",
    "benchmarks/fold.py",
]


def faults(path: str, source: str) -> list[Fault]:
    modules = [Module(place, source if place == path else "") for place in PLACES]
    return upward_imports(HOUSE, edges(modules))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("server/errors.py", "from atoll.server.rounds import policy"),
        ("server/errors.py", "def f():\n    import atoll.server.process"),
        ("server/rounds/policy.py", "from atoll.server.rounds import late"),
        ("server/rounds/policy.py", "import atoll.server.rounds.deep.run"),
        ("server/rounds/policy.py", "if TYPE_CHECKING:\n    from atoll.server.views.run import View"),
        ("server/rounds/late.py", "from atoll.server.rounds.deep import run"),
        ("server/views/run.py", "from atoll import Task"),
        ("aggregation/fold/grid.py", "import atoll.server.errors"),
        ("aggregation/fold/grid.py", "import atoll.parallel.plan"),
        ("parallel/plan.py", "from atoll.aggregation.fold.means import mean"),
        ("parallel/plan.py", "import atoll"),
    ],
)
def test_an_import_that_runs_up_is_reported(path: str, source: str) -> None:
    (fault,) = faults(path, source)
    assert fault.path == path
    assert fault.line == source.count("\n") + 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("server/process.py", "import atoll.server.rounds.late\nimport atoll.server.errors"),
        ("server/rounds/policy.py", "from atoll.server.rounds import other\nfrom atoll.server.errors import Away"),
        ("server/rounds/late.py", "from atoll.server.rounds.policy import Mode"),
        ("server/rounds/deep/run.py", "from atoll.server.rounds import policy"),
        ("server/errors.py", "from atoll.aggregation.fold import means\nfrom atoll import __version__"),
        ("parallel/plan.py", "from atoll.tensors import layout"),
        ("atoll/__init__.py", "import atoll.server.process"),
        ("benchmarks/fold.py", "import atoll.server.process"),
    ],
)
def test_an_import_that_runs_down_is_let_through(path: str, source: str) -> None:
    assert faults(path, source) == []


def test_several_names_of_one_import_are_one_fault() -> None:
    assert len(faults("server/errors.py", "from atoll.server.rounds.policy import A, B")) == 1


def missing(paths: list[str], sources: dict[str, str] | None = None) -> list[str]:
    modules = [Module(path, (sources or {}).get(path, "")) for path in paths]
    return [str(fault) for fault in missing_places(HOUSE, paths, edges(modules))]


def test_every_file_has_a_place() -> None:
    assert missing(PLACES) == []


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("server/fresh.py", "server/fresh.py"),
        ("server/fresh/a.py", "server/fresh"),
        ("server/views/x/a.py", "server/views/x"),
    ],
)
def test_a_new_folder_or_root_file_is_reported(path: str, place: str) -> None:
    assert missing([*PLACES, path]) == [f"{place}: is missing in tests/house/floors.py"]


def test_a_place_without_a_file_is_reported() -> None:
    rest = [path for path in PLACES if path != "server/views/run.py"]
    assert missing(rest) == ["server/views: is in tests/house/floors.py, and has no file"]


def test_the_init_of_a_room_needs_a_place_as_soon_as_it_imports() -> None:
    found = missing(PLACES, {"server/__init__.py": "import atoll.server.errors"})
    assert found == ["server/__init__.py: is missing in tests/house/floors.py"]


def test_a_proposal_puts_every_place_on_its_lowest_floor() -> None:
    modules = [
        Module("server/__init__.py", ""),
        Module("server/errors.py", ""),
        Module("server/alone.py", ""),
        Module("server/rounds/run.py", "import atoll.server.errors"),
        Module("server/views/run.py", "import atoll.server.rounds.run\nimport atoll.client.x"),
        Module("client/x.py", ""),
    ]
    found = proposal(House({}, {}), "server", [module.path for module in modules], edges(modules))
    assert found.splitlines() == [
        '    "server": (',
        '        ("alone.py", "errors.py"),',
        '        ("rounds",),',
        '        ("views",),',
        "    ),",
    ]


CIRCULAR = [
    Module("server/x/one.py", "from atoll.server.y.one import Thing"),
    Module("server/y/one.py", ""),
    Module("server/y/two.py", "import atoll.server.x.one"),
]


def test_a_proposal_shows_what_closes_a_circle() -> None:
    found = proposal(House({}, {}), "server", [module.path for module in CIRCULAR], edges(CIRCULAR)).splitlines()
    assert found[1] == '        ("x", "y"),'
    assert "A circle of server/x, server/y:" in found
    assert "    server/x/one.py:1 server/y/one.py Thing" in found


def test_a_file_that_the_table_names_is_a_place_of_a_proposal() -> None:
    house = House({"server": (("y/one.py",),)}, {})
    found = proposal(house, "server", [module.path for module in CIRCULAR], edges(CIRCULAR)).splitlines()
    assert found[1:-1] == ['        ("y/one.py",),', '        ("x",),', '        ("y",),']


def test_the_table_has_every_room_and_names_a_place_once() -> None:
    assert set(FLOORS) == set(MAY_IMPORT) == set(ROOMS)
    for room, floors in FLOORS.items():
        places = [place for floor in floors for place in floor]
        assert len(places) == len(set(places)), room
