import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from examples import stdlib_text


def text_of(windows: Iterable[Any]) -> bytes:
    """The bytes of all targets, without the ends of documents."""
    targets = [int(t) for _, targets in windows for t in targets if t not in (-100, 256)]
    return bytes(targets)


def test_the_sources_are_pythons_own_in_order_and_within_the_limit() -> None:
    files = stdlib_text.files(1_000_000)
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root).as_posix() for path in files]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert not [name for name in names if "test/" in name or "site-packages" in name]
    assert 800_000 < sum(path.stat().st_size for path in files) <= 1_000_000
    assert set(files) < set(stdlib_text.files())


def test_every_source_belongs_to_one_owner_and_split_or_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(stdlib_text, "windows", seen.extend)
    for site in stdlib_text.SITES:
        for split in ("train", "test"):
            stdlib_text.load_site(site, split)
    stdlib_text.load_test()
    assert sorted(seen) == sorted(stdlib_text.files())


def test_the_windows_hold_the_text() -> None:
    windows = stdlib_text.load_test()
    inputs, targets = windows[0]
    assert inputs.shape == targets.shape == (stdlib_text.SEQUENCE,)
    first, *_ = stdlib_text.files()
    assert text_of(windows[index] for index in range(20)) in first.read_bytes()


def test_a_python_without_sources_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="no source of the standard library"):
        stdlib_text.files(123)
