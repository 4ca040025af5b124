"""The references to operators' own code: resolved by module or by file, with every failure told in one sentence."""

import sys
from pathlib import Path

import pytest

from atoll.plugins.kind import Kind
from atoll.plugins.reference import check_reference, resolve
from atoll.protocol.settings import ConfigError

THING = Kind(
    name="thing",
    group="atoll.things",
    setting="table.thing",
    allowed="a function of (x)",
    failed=ConfigError,
    form="function",
)


def test_a_module_s_attribute_is_found() -> None:
    assert resolve("json:dumps") is __import__("json").dumps


def test_a_file_named_like_a_room_is_found_and_collides_with_nothing(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_server.py").write_text("answer = 42\n")
    (tmp_path / "server.py").write_text(
        "import neighbour_of_server\nclass Mine:\n    answer = neighbour_of_server.answer\n"
    )
    mine = resolve(f"{tmp_path}/server.py:Mine")
    assert getattr(mine, "answer", None) == 42
    assert "server" not in sys.modules
    assert sys.path[0] != str(tmp_path), "what lies beside it must not stand in for ours"


@pytest.mark.parametrize("reference", ["json", "json:", ":dumps", "json:dumps()", "json:not an identifier", ""])
def test_what_is_no_reference_is_refused(reference: str) -> None:
    with pytest.raises(ValueError, match="neither module:attribute nor"):
        resolve(reference)
    with pytest.raises(ValueError, match="allowed: module:attribute"):
        check_reference(reference)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("import sys\nsys.exit(3)", "cannot be loaded: SystemExit: 3"),
        ("f = 3", r"mine.py:f: is of the type int; allowed: a function of \(x\)"),
        ("other = 1", "there is no f in"),
        (None, "there is no file"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_the_operator_s_to_mend(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        THING.load(f"{tmp_path}/mine.py:f")


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="no_such_module_of_ours"):
        THING.load("no_such_module_of_ours:f")
