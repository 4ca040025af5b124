"""What is installed is one package, `atoll`, with every room in it as real files."""

import email
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.house import tree

ROOT = Path(__file__).parents[1]
ROOMS = tuple(room for room in tree.ROOMS if room != "atoll")


def build(kind: str, source: Path, target: Path) -> Path:
    """Build with the pinned backend itself: no isolation, so no network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    [built] = target.iterdir()
    return built


@pytest.fixture(scope="module")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(built_wheel: Path) -> set[str]:
    with zipfile.ZipFile(built_wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_s_top_level_is_exactly_atoll(wheel: set[str]) -> None:
    top = {name.split("/")[0] for name in wheel}
    [info] = [name for name in top if name.endswith(".dist-info")]
    assert top == {"atoll", info}


def test_the_wheel_holds_every_file_of_every_room(wheel: set[str]) -> None:
    for room in ROOMS:
        sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / room).rglob("*.py")}
        assert sources, room
        assert {f"atoll/{source}" for source in sources} <= wheel
    assert {
        "atoll/__init__.py",
        "atoll/py.typed",
        "atoll/protocol/atoll.proto",
        "atoll/protocol/atoll_pb2.pyi",
    } <= wheel
    assert not [name for name in wheel if "__pycache__" in name]


def test_the_wheel_holds_the_licence_and_names_it_and_the_authors(built_wheel: Path, wheel: set[str]) -> None:
    [info] = {name.split("/")[0] for name in wheel if ".dist-info/" in name}
    with zipfile.ZipFile(built_wheel) as archive:
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "the Atoll authors"


def test_the_rooms_are_relative_links() -> None:
    """A link with an absolute target would work on one machine only."""
    for room in ROOMS:
        assert (ROOT / "atoll" / room).readlink() == Path("..") / room


def test_a_wheel_of_the_source_archive_holds_the_same(wheel: set[str], tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build("wheel", unpacked, tmp_path / "wheel")) as rebuilt:
        assert set(rebuilt.namelist()) == wheel
