"""The folder of data sets, and the check of a file's digest."""

import hashlib
from pathlib import Path

import pytest

from examples.datasets.folder import BadData, NoData, data_folder, find, read_checked


def test_the_folder_is_the_one_that_the_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mnist").mkdir()
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    assert data_folder("mnist") == tmp_path / "mnist"
    with pytest.raises(NoData, match=r"ATOLL_DATA=.*: there is no folder cifar in it \(folders: mnist\)"):
        data_folder("cifar")
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(NoData, match=r"no folder mnist in it \(folders: none\)"):
        data_folder("mnist")
    monkeypatch.delenv("ATOLL_DATA")
    with pytest.raises(NoData, match="ATOLL_DATA is not set; set it to the folder in which mnist/ lies"):
        data_folder("mnist")


def test_the_first_name_that_is_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.gz").touch()
    assert find(tmp_path, "a", "a.gz").name == "a.gz"
    with pytest.raises(NoData, match=r"has none of the files b, b\.gz"):
        find(tmp_path, "b", "b.gz")


def test_a_digest_beside_the_file_or_given_must_be_right(tmp_path: Path) -> None:
    file, right = tmp_path / "a.txt", hashlib.sha256(b"hello").hexdigest()
    file.write_bytes(b"hello")
    assert read_checked(file) == read_checked(file, right) == read_checked(file, right.upper()) == b"hello"
    with pytest.raises(BadData, match=rf"a\.txt: 5 bytes with the SHA-256 {right}; expected: {'0' * 64}"):
        read_checked(file, "0" * 64)
    (tmp_path / "SHA256SUMS").write_text(f"{'1' * 64}  other\n{right} *a.txt\n")
    assert read_checked(file) == b"hello"
    file.write_bytes(b"hallo")
    with pytest.raises(BadData, match=f"expected by its SHA256SUMS: {right}"):
        read_checked(file)
    (tmp_path / "SHA256SUMS").write_text("nonsense\n")
    with pytest.raises(BadData, match="line 1 is 'nonsense', but must be a SHA-256 and a name"):
        read_checked(file)


@pytest.mark.parametrize("name", ["  a.txt", " *a.txt", "  ./a.txt", " *./a.txt"])
def test_names_are_those_of_sha256sum_however_it_was_called(tmp_path: Path, name: str) -> None:
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(b'hello').hexdigest()}{name}\n")
    (tmp_path / "a.txt").write_bytes(b"hallo")
    with pytest.raises(BadData, match="expected by its SHA256SUMS"):
        read_checked(tmp_path / "a.txt")


def test_a_file_that_its_sums_do_not_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text(f"{'1' * 64}  other\n")
    (tmp_path / "a.txt").write_bytes(b"hello")
    with pytest.raises(BadData, match=r"SHA256SUMS: does not list a\.txt, so its digest cannot be checked"):
        read_checked(tmp_path / "a.txt")
    assert read_checked(tmp_path / "a.txt", hashlib.sha256(b"hello").hexdigest()) == b"hello"


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="there is no such file"):
        read_checked(tmp_path / "a")


def test_a_folder_is_no_file_and_sums_that_are_no_text_are_told(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="is a folder, but must be a file"):
        read_checked(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"hello")
    (tmp_path / "SHA256SUMS").write_bytes(b"\xff\xfe")
    with pytest.raises(BadData, match="SHA256SUMS: is UTF-16; save it as UTF-8"):
        read_checked(tmp_path / "a.txt")
