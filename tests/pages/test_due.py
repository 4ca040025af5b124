from pathlib import Path

import pytest

from tests.pages import due


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    found: set[str] = set()
    monkeypatch.setattr(due, "changed_files", lambda: found)
    monkeypatch.setattr(due, "is_due", lambda number, days: False)
    monkeypatch.setattr(due, "DAY", "739949")
    return found


def is_long(page: str) -> bool:
    return bool(due.when_due(page, page=page, number=0).marks)


@pytest.mark.parametrize(
    ("page", "file"),
    [
        ("docs/task.md", "docs/task.md"),
        ("docs/training.md", "examples/digits.py"),
        ("docs/notebooks/first_federation.ipynb", "docs/notebooks/first_federation.ipynb"),
        ("examples/tumours_sklearn.py", "examples/tumours.py"),
    ],
)
def test_a_page_is_executed_when_it_or_what_it_names_has_changed(changed: set[str], page: str, file: str) -> None:
    changed.add("CHANGELOG.md")
    assert is_long(page)
    changed.add(file)
    assert not is_long(page)


def test_where_git_cannot_tell_every_page_has_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(due, "ROOT", tmp_path)
    due.changed_files.cache_clear()
    assert due.changed_files() is None
    due.changed_files.cache_clear()


def test_a_page_that_has_its_turn_is_executed(changed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due, "is_due", lambda number, days: number == 3)
    assert due.when_due(1, page="README.md", number=3).marks == ()
    assert due.when_due(1, page="README.md", number=4).marks == (pytest.mark.long,)


@pytest.mark.real
def test_a_change_of_the_working_tree_and_of_the_last_commit_is_seen(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(due, "ROOT", tmp_path)
    monkeypatch.delenv("ATOLL_BASE", raising=False)
    for variable in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{variable}_NAME", "a")
        monkeypatch.setenv(f"{variable}_EMAIL", "a@example.org")
    due._git("init", "-q", "-b", "main")
    for name in ("first", "second", "third"):
        (tmp_path / name).write_text("1")
        due._git("add", name)
        due._git("commit", "-q", "-m", name)
    (tmp_path / "first").write_text("2")
    (tmp_path / "fourth").write_text("2")
    due.changed_files.cache_clear()
    assert due.changed_files() == {"first", "third", "fourth"}
    due._git("checkout", "-q", "-b", "topic", "HEAD~1", "-f")
    due._git("commit", "-q", "--allow-empty", "-m", "topic")
    due.changed_files.cache_clear()
    assert due.changed_files() == {"fourth"}
    due.changed_files.cache_clear()
