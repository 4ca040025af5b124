"""The extensions of installed packages: found by their entry points, and every mistake refused in one sentence."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.plugins.entry_points import Declared, declared
from atoll.plugins.kind import AS_RECORDED, Kind, listed
from atoll.protocol.settings import ConfigError
from tests.plugins.packages import install

THINGS = Kind(
    name="thing",
    group="atoll.things",
    setting="table.thing",
    allowed="a function of (x)",
    failed=ConfigError,
    form="function",
    built_in=("plain", "fancy"),
)
STRICT, RECORDED = SimpleNamespace(context=None), SimpleNamespace(context=AS_RECORDED)
ON_THIS_MACHINE = (
    "a thing of a package has its name once the package is installed on this machine: `atoll plugins` lists them"
)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Install a package that declares things; each in a folder of its own on `sys.path`."""

    def installed(package: str, things: dict[str, str] | None = None, **more: Any) -> Path:
        folder = tmp_path / f"{package}-{more.get('version', '')}"
        install(folder, package, points={"atoll.things": things or {}, "others": {"plain": "a:b"}}, **more)
        monkeypatch.syspath_prepend(folder)
        return folder

    return installed


def check(name: str, info: Any = STRICT) -> str:
    return THINGS.check(name, info)


def refusal(name: str) -> str:
    with pytest.raises(ValueError, match="allowed: ") as refused:
        check(name)
    return str(refused.value)


def test_the_name_that_a_package_declares_stands_for_its_object(packages: Callable[..., Path]) -> None:
    packages("acme-things", {"mine": "plugin_module_one:mine"}, modules={"plugin_module_one": "mine = abs\n"})
    assert check("mine") == "mine"
    assert THINGS.load("mine") is abs
    assert THINGS.load("math:floor")(2.5) == 2
    assert declared("atoll.things") == {
        "mine": [Declared("atoll.things", "mine", "acme-things", "1.2", "plugin_module_one:mine")]
    }


def test_a_built_in_name_and_a_reference_need_no_package() -> None:
    for value in ("plain", "fancy", "a:b", "path/to/file.py:b"):
        assert check(value) == value


def test_an_unknown_name_is_told_the_built_in_names_and_the_installed_ones(packages: Callable[..., Path]) -> None:
    alone = f'allowed: "plain" | "fancy" | module:function | path/to/file.py:function; {ON_THIS_MACHINE}'
    assert refusal("mine") == alone
    packages("acme-things", {"ours": "no_such_module:f"})
    assert f'"fancy" | "ours" (acme-things 1.2) | module:function | path/to/file.py:function; {ON_THIS_MACHINE}' in (
        refusal("mine")
    )
    with pytest.raises(ConfigError, match=r"^table\.thing: got 'mine': allowed: \"plain\""):
        THINGS.load("mine")


def test_a_package_with_a_built_in_name_leaves_open_which_is_meant(packages: Callable[..., Path]) -> None:
    packages("acme-things", {"plain": "theirs:f"})
    assert refusal("plain") == (
        "it is a built-in thing, and the package acme-things 1.2 declares one of the same name; allowed: a name that "
        "stands for one thing: uninstall the package, or name its thing by theirs:f"
    )
    assert check("fancy") == "fancy", "others are not concerned"
    assert check("plain", RECORDED) == "plain", "a run that was accepted before goes on with the built-in one"


def test_two_packages_with_one_name_are_refused(packages: Callable[..., Path]) -> None:
    packages("b-things", {"mine": "b_things:f"})
    packages("a-things", {"mine": "a_things:f"}, version="3")
    assert refusal("mine") == (
        "the packages a-things 3 and b-things 1.2 declare it; allowed: a name that one package declares: uninstall the "
        "other, or name the object itself, a_things:f or b_things:f"
    )
    with pytest.raises(ConfigError, match="got 'mine': the packages a-things 3 and b-things"):
        THINGS.load("mine")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("mine = 3\n", "is of the type int"),
        ("1 / 0\n", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", "cannot be loaded: SystemExit: 3"),
        ("raise RuntimeError('two\\nlines')\n", "cannot be loaded: RuntimeError: two lines"),
        ("other = abs\n", "cannot be loaded: AttributeError: module '{0}' has no attribute 'mine'"),
        (None, "cannot be loaded: ModuleNotFoundError: No module named '{0}'"),
    ],
)
def test_what_does_not_load_or_is_of_another_kind_names_its_package(
    packages: Callable[..., Path], source: str | None, reason: str, request: pytest.FixtureRequest
) -> None:
    module = f"plugin_module_{abs(hash(request.node.name))}"
    packages("acme-things", {"mine": f"{module}:mine"}, modules={} if source is None else {module: source})
    assert check("mine") == "mine", "the check of the settings imports nothing"
    told = (
        f"{module}:mine of the package acme-things 1.2 {reason.format(module)}; allowed: a function of (x): correct the"
    )
    with pytest.raises(ConfigError) as refused:
        THINGS.load("mine")
    assert refused.value.faults == (f"table.thing: got 'mine': {told} package, or name another thing",)
    assert [each.fault for each in listed([THINGS]) if each.name == "mine"] == [f"{told} package"]


def test_settings_that_were_accepted_before_are_read_without_their_package() -> None:
    assert check("gone", RECORDED) == "gone"
    with pytest.raises(ConfigError, match="got 'gone': allowed"):
        THINGS.load("gone")
    with pytest.raises(ValueError, match="allowed"):
        check("no name at all", RECORDED)


def test_the_list_has_everything_that_is_installed_with_what_is_wrong(packages: Callable[..., Path]) -> None:
    packages("a-things", {"one": "math:floor", "plain": "math:ceil", "two": "no_module:f", "odd name": "math:floor"})
    packages("b-things", text="[atoll.thingies]\nthree = math:floor\n")
    packages("c-things", text="[atoll.things]\nfour\n")
    found = {(each.package, each.kind, each.name): each for each in listed([THINGS])}
    assert {key: bool(each.fault) for key, each in found.items()} == {
        ("a-things", "thing", "one"): False,
        ("a-things", "thing", "plain"): True,
        ("a-things", "thing", "two"): True,
        ("a-things", "thing", "odd name"): True,
        ("b-things", "atoll.thingies", "three"): True,
        ("c-things", "", ""): True,
    }
    assert found["b-things", "atoll.thingies", "three"].fault == "there is no group atoll.thingies; known: atoll.things"
    assert found["c-things", "", ""].fault.startswith("its entry_points.txt cannot be read: ")
    assert found["a-things", "thing", "one"].object == "math:floor"
    with pytest.raises(ValueError, match="allowed"):
        check("odd name")


def test_an_older_copy_of_a_package_further_down_the_path_does_not_count(packages: Callable[..., Path]) -> None:
    packages("acme-things", {"mine": "math:floor", "old": "math:floor"}, version="1")
    assert set(declared("atoll.things")) == {"mine", "old"}
    packages("acme-things", {"mine": "math:ceil"}, version="2")
    assert {name: [each.version for each in found] for name, found in declared("atoll.things").items()} == {
        "mine": ["2"]
    }
