"""The codecs of installed packages: their names on the wire, and what a name opens."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atoll.plugins.entry_points import source_digest
from atoll.tensors.codecs import installed
from atoll.tensors.codecs.names import FAMILIES, family_of, known_codecs, open_codec, parse_codec, supported
from tests.plugins.packages import CODEC, install

Packages = Callable[..., Path]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    """Install a package with a module of its own in a folder of its own, as a process that has opened no codec."""
    for name in ("_BY_SETTING", "_OPENED", "_LOADED"):
        monkeypatch.setattr(installed, name, {})
    parse_codec.cache_clear()

    def package(module: str, name: str = "rounded", source: str = CODEC, folder: str = "site", **more: str) -> Path:
        points = {"atoll.codecs": {name: f"{module}:Rounded"}}
        place = install(tmp_path / folder, f"acme-{module}", modules={module: source}, points=points, **more)
        monkeypatch.syspath_prepend(place)
        return place

    return package


def test_a_name_has_the_version_and_the_source_of_its_package(packages: Packages) -> None:
    folder = packages("codec_module_one")
    digest = source_digest("codec_module_one:Rounded")[:8]
    codec = installed.open_for("rounded", {"levels": 3})
    assert codec.name == f'rounded@1.2-{digest}:{{"levels":3}}'
    assert installed.name_for("rounded", {"levels": 3}) == codec.name
    assert installed.name_for("rounded", {}) == "rounded", "it is not open"
    assert installed.families() == (f"rounded@1.2-{digest}",) == (family_of(codec.name),)
    assert supported() == (*FAMILIES, f"rounded@1.2-{digest}")
    assert parse_codec(codec.name) is open_codec(codec.name) is codec
    assert codec.is_biased
    assert codec.decode(codec.encode(np.ones(2, np.float32), np.random.default_rng(0)), 2).tolist() == [1, 1]
    other = (folder / "codec_module_one.py").read_text() + "# a later line\n"
    (folder / "codec_module_one.py").write_text(other)
    assert source_digest("codec_module_one:Rounded")[:8] != digest
    (folder / "codec_module_one.py").write_bytes(other.replace("\n", "\r\n").encode())
    assert source_digest("codec_module_one:Rounded") == source_digest("codec_module_one:Rounded")


def test_a_name_from_the_wire_opens_nothing_by_itself(packages: Packages) -> None:
    packages("codec_module_two")
    (family,) = installed.families()
    name = family + ':{"levels":5}'
    with pytest.raises(ValueError, match="is not open here"):
        parse_codec(name)
    assert open_codec(name).name == name
    assert parse_codec(name).num_bytes(3) == 7


def test_another_version_is_refused_by_both_names(packages: Packages) -> None:
    packages("codec_module_three")
    (family,) = installed.families()
    other = re.sub("@1.2-.{8}", "@1.3-00000000", family)
    with pytest.raises(ValueError, match=re.escape(f"{other} is required, and {family} is installed here")):
        open_codec(other)
    assert installed.other_version(other, frozenset({family, "topk"})) == family
    assert installed.other_version(family, frozenset({family})) == ""
    with pytest.raises(ValueError, match="no installed package declares a codec 'gone' here"):
        open_codec("gone@1.2-00000000")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"levels": 0}, "codec_options: levels: must be in 1..127, got 0"),
        ({"levls": 4}, "codec_options: TypeError: .*unexpected keyword argument 'levls'"),
        ({"levels": "x" * 300}, "has 334 characters with its options; allowed: at most 256"),
    ],
)
def test_refused_options_are_told(packages: Packages, options: dict[str, object], told: str) -> None:
    packages("codec_module_options")
    with pytest.raises(ValueError, match=told):
        installed.open_for("rounded", options)


@pytest.mark.parametrize("options", ["[]", '{"levels":[7]}', '{"levels":null}', "{", '{"levels":1e999}', "{}x"])
def test_options_of_a_peer_are_plain_values_by_name(packages: Packages, options: str) -> None:
    packages("codec_module_four")
    (family,) = installed.families()
    with pytest.raises(ValueError, match=r"."):
        open_codec(f"{family}:{options}")


def test_a_package_that_changes_under_a_process_needs_a_new_one(packages: Packages) -> None:
    folder = packages("codec_module_five")
    codec = installed.open_for("rounded", {})
    (folder / "codec_module_five.py").write_text(CODEC + "\nLATER = 1\n")
    assert installed.open_for("rounded", {}) is codec, "what is open goes on"
    with pytest.raises(ValueError, match=r"is installed, and this process has loaded .*: start it again"):
        installed.open_for("rounded", {"levels": 2})


def test_a_package_that_does_not_load_names_its_error(packages: Packages) -> None:
    packages("codec_module_six", source="raise SystemExit('no licence')")
    with pytest.raises(ValueError, match=r"package acme-codec_module_six 1.2 cannot be loaded: SystemExit: no licence"):
        open_codec(installed.families()[0])


def test_a_name_that_two_packages_declare_is_none(packages: Packages) -> None:
    packages("codec_module_seven")
    packages("codec_module_eight", folder="other")
    assert installed.families() == ()
    with pytest.raises(ValueError, match=r"1.2 and acme-codec_module_seven 1.2 declare a codec 'rounded' here"):
        installed.open_for("rounded", {})


def test_a_package_without_its_module_is_not_named(packages: Packages) -> None:
    folder = packages("codec_module_nine")
    (folder / "codec_module_nine.py").unlink()
    assert installed.families() == ()


@pytest.mark.parametrize(
    "name", ["topk:0.01", "a@b", "a@1-0123456", "a@1-0123456G", "@1-01234567", "a@1-01234567 ", "a@1-01234567:é"]
)
def test_other_texts_are_no_names(name: str) -> None:
    assert not installed.is_installed(name)
    assert not installed.is_installed("a@1-01234567:" + "x" * 250)


def test_a_peer_names_at_most_some_dozens() -> None:
    many = [f"codec{number}@1.2-01234567" for number in range(1000)]
    known = known_codecs(["topk", "later", *many, "<script>", "sign"])
    assert {"topk", "sign", many[0]} <= known
    assert len(known) == 64 + 2
    assert known_codecs([]) == frozenset()


def test_the_source_is_that_of_the_regular_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace package has other distributions' code beside it."""
    monkeypatch.syspath_prepend(tmp_path)
    inner = tmp_path / "codec_namespace" / "ours"
    inner.mkdir(parents=True)
    for name in ("__init__.py", "codecs.py", "deep.txt"):
        (inner / name).write_text("x = 1\n")
    first = source_digest("codec_namespace.ours.codecs:x")
    for change, differs in {"deep.txt": False, "../theirs.py": False, "codecs.py": True, "__init__.py": True}.items():
        (inner / change).write_text("x = 2\n")
        assert (source_digest("codec_namespace.ours.codecs:x") != first) == differs, json.dumps(change)
        first = source_digest("codec_namespace.ours.codecs:x")
    with pytest.raises(ImportError, match=r"no module codec_namespace\.gone"):
        source_digest("codec_namespace.gone.codecs:x")
