"""Imports between modules of a made-up house."""

import pytest

from tests.house.imports import Edge, edges, folder_circles, imported_names, module_circles, room_levels
from tests.house.tree import Module


def house(**sources: str) -> list[Module]:
    """Modules by path, with __ in place of each slash."""
    return [Module(f"{name.replace('__', '/')}.py", source) for name, source in sources.items()]


PACKAGE = [Module("server/rounds/__init__.py", ""), Module("server/rounds/policy.py", "Mode = 1")]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import atoll.server.rounds.policy", [("server/rounds/policy.py", 1, "")]),
        ("import atoll.server.rounds.policy.Mode", [("server/rounds/policy.py", 1, "")]),
        ("from atoll.server.rounds import policy", [("server/rounds/policy.py", 1, "")]),
        ("from atoll.server.rounds import Round", [("server/rounds/__init__.py", 1, "Round")]),
        ("from atoll.server.rounds.policy import Mode as M", [("server/rounds/policy.py", 1, "Mode")]),
        (
            "if TYPE_CHECKING:\n    from atoll.server.rounds.policy import Mode",
            [("server/rounds/policy.py", 2, "Mode")],
        ),
        ("def f():\n    from atoll.server.rounds import policy", [("server/rounds/policy.py", 2, "")]),
        ("from .rounds.policy import Mode", [("server/rounds/policy.py", 1, "Mode")]),
        ("from .rounds import policy", [("server/rounds/policy.py", 1, "")]),
        ("import numpy\nfrom os import path\nfrom atoll.server.other import thing", []),
    ],
)
def test_an_import_is_an_edge(source: str, expected: list[tuple[str, int, str]]) -> None:
    found = edges([*PACKAGE, Module("server/run.py", source)])
    assert found == [Edge("server/run.py", *rest) for rest in expected]


def test_a_relative_import_counts_from_its_package() -> None:
    package = Module("server/rounds/__init__.py", "from . import policy\nfrom .. import run")
    found = edges([package, PACKAGE[1], Module("server/run.py", "")])
    assert [edge.imported for edge in found] == ["server/rounds/policy.py", "server/run.py"]


def test_every_imported_name_is_given_in_full() -> None:
    module = Module("server/run.py", "import os.path\nfrom atoll.server import rounds\nfrom .x import y")
    assert list(imported_names(module)) == [(1, "os.path"), (2, "atoll.server.rounds"), (3, "atoll.server.x.y")]


@pytest.mark.parametrize(
    "back",
    [
        "from atoll.server.b import y",
        "def f():\n    from atoll.server.b import y",
        "if TYPE_CHECKING:\n    from atoll.server.b import y",
    ],
    ids=["plain", "lazy", "typing"],
)
def test_a_circle_between_modules_is_reported_once(back: str) -> None:
    modules = house(server__a=back, server__b="\nfrom atoll.server.a import x", server__c="import atoll.server.a")
    (fault,) = module_circles(edges(modules))
    assert fault.path == "server/a.py"
    assert fault.text == "imports server/b.py; server/b.py:2 imports server/a.py"


def test_a_circle_of_many_says_how_many() -> None:
    modules = house(
        server__a="import atoll.server.b",
        server__b="import atoll.server.a\nimport atoll.server.c",
        server__c="import atoll.server.a",
    )
    (fault,) = module_circles(edges(modules))
    assert "a circle of 3 modules" in fault.text


def test_no_circle_is_reported_where_imports_only_meet() -> None:
    modules = house(
        server__a="import atoll.server.b\nimport atoll.server.c",
        server__b="import atoll.server.d",
        server__c="import atoll.server.d",
        server__d="",
    )
    assert module_circles(edges(modules)) == []


def test_a_circle_between_folders_needs_no_circle_between_modules() -> None:
    modules = house(
        server__x__one="import atoll.server.y.one",
        server__y__one="",
        server__y__two="import atoll.server.x.two",
        server__x__two="",
    )
    found = edges(modules)
    assert module_circles(found) == []
    (fault,) = folder_circles(found, {module.path: module.folder for module in modules})
    assert fault.text == "imports server/y/one.py; server/y/two.py:1 imports server/x/two.py"
    apart = {module.path: module.path for module in modules}
    assert folder_circles(found, apart) == []


def test_circles_between_folders_are_of_one_room() -> None:
    modules = house(
        server__x__one="import atoll.client.y.one",
        client__y__one="",
        client__y__two="import atoll.server.x.two",
        server__x__two="",
    )
    assert folder_circles(edges(modules), {module.path: module.folder for module in modules}) == []


def test_levels_are_of_one_room() -> None:
    modules = house(
        client__a="import atoll.server.a",
        server__a="import atoll.server.b",
        server__b="import atoll.server.c\nimport atoll.protocol.x",
        server__c="",
        protocol__x="import atoll.protocol.y",
        protocol__y="",
    )
    found = edges(modules)
    assert [room_levels(found, room) for room in ("server", "protocol", "client")] == [3, 2, 1]
