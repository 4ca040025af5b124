"""The build of a program: one for each content of its sources."""

import shutil
from pathlib import Path

import pytest

from atoll.protocol.build import LETTERS, build_of


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for path, text in {"__init__.py": "", "room/__init__.py": "1\n", "room/a.py": "x = 1\n", "py.typed": ""}.items():
        (tmp_path / "atoll" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "atoll" / path).write_text(text)
    return tmp_path / "atoll"


def test_a_copy_and_a_checkout_with_linked_rooms_have_the_same_build(package: Path, tmp_path: Path) -> None:
    build = build_of(package)
    assert len(build) == LETTERS
    assert int(build, 16) >= 0
    shutil.move(package / "room", tmp_path / "room")
    (package / "room").symlink_to("../room")
    (package / "room/__pycache__").mkdir()
    (package / "room/__pycache__/a.py").write_text("no source")
    assert build_of(package) == build


@pytest.mark.parametrize("change", ["bytes", "name", "more", "less"])
def test_any_change_of_the_sources_is_another_build(package: Path, change: str) -> None:
    before, path = build_of(package), package / "room/a.py"
    match change:
        case "bytes":
            path.write_text("x = 2\n")
        case "name":
            path.rename(package / "room/b.py")
        case "more":
            (package / "b.py").write_text("")
        case "less":
            path.unlink()
    assert build_of(package) != before
