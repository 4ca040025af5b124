"""LEAF's JSON, written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.datasets.folder import BadData, NoData
from examples.datasets.leaf import LETTERS, read_leaf

USERS = {"f1": ([[0.0, 0.5], [1.0, 0.25], [0.5, 0.5]], [3, 1, 3]), "f2": ([[2.0, 2.5]], [0])}


def write(folder: Path, held: dict[str, Any], /, name: str = "all_data_0.json", **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(held),
        "num_samples": [len(x) for x, _ in held.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in held.items()},
    }
    (folder / name).write_text(json.dumps(content | more))
    return folder


def test_each_user_is_an_owner(tmp_path: Path) -> None:
    write(tmp_path / "all_data", USERS)
    write(tmp_path / "all_data", {"f3": ([[9.0, 9.0]] * 2, [1, 1])}, name="all_data_1.json")
    owned = read_leaf(tmp_path, test_fraction=0.0)
    assert owned.sites == ("f1", "f2", "f3")
    inputs, target = owned("f1", "train")[1]
    assert (inputs.tolist(), inputs.dtype, target.item(), target.dtype) == ([1.0, 0.25], torch.float32, 1, torch.int64)
    assert [len(owned(user, "train")) for user in owned.sites] == [3, 1, 2]
    assert owned("f1", "test") is None
    with pytest.raises(KeyError, match="there is no owner 'f9'"):
        owned("f9", "train")


def test_the_last_of_each_user_are_to_test_on(tmp_path: Path) -> None:
    owned = read_leaf(write(tmp_path, USERS), test_fraction=0.34)
    assert [target.item() for _, target in owned("f1", "test")] == [3]
    assert len(owned("f1", "train")) == 2
    assert len(owned("f2", "train")) == 1
    assert owned("f2", "test") is None
    assert read_leaf(tmp_path, min_examples=2).sites == ("f1",)


def test_leaf_s_own_split_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "train", USERS)
    write(tmp_path / "test", {"f1": ([[7.0, 7.0]], [7]), "stranger": ([[8.0, 8.0]], [8])})
    owned = read_leaf(tmp_path)
    assert owned.sites == ("f1", "f2")
    assert owned("f1", "test")[0][0].tolist() == [7.0, 7.0]
    assert owned("f2", "test") is None


def test_texts_are_codes_of_leaf_s_eighty_letters(tmp_path: Path) -> None:
    """`ALL_LETTERS.find(c)` in LEAF's utils/language_utils.py: "\\n !" first, "}" last."""
    assert (len(LETTERS), LETTERS[:3], LETTERS[-1], LETTERS.find("A"), LETTERS.find("a")) == (80, "\n !", "}", 25, 53)
    owned = read_leaf(write(tmp_path, {"HAMLET": (["To be", "or no"], [",", "t"])}), test_fraction=0.0)
    inputs, target = owned("HAMLET", "train")[0]
    assert inputs.tolist() == [LETTERS.find(letter) for letter in "To be"]
    assert (inputs.dtype, target.item()) == (torch.int64, LETTERS.find(","))


def test_targets_with_fractions_stay_numbers(tmp_path: Path) -> None:
    owned = read_leaf(write(tmp_path, {"a": ([[1], [2]], [0.5, 1.0])}), test_fraction=0.0)
    assert owned.dataset.tensors[1].tolist() == [0.5, 1.0]
    whole = read_leaf(write(tmp_path, {"a": ([[1], [2]], [0.0, 1.0])}), test_fraction=0.0)
    assert whole.dataset.tensors[1].dtype == torch.int64


@pytest.mark.parametrize(
    ("users", "more", "fault"),
    [
        (USERS, {"num_samples": [3, 2]}, "user 'f2' has 1 x and 1 y, but num_samples is 2"),
        (USERS, {"num_samples": [3]}, "2 users, but 1 num_samples"),
        (USERS, {"users": ["f1", "f7"]}, "user 'f7' has no lists x and y in user_data"),
        (USERS, {"users": ["f1", ""]}, "user '' has no lists"),
        (USERS, {"user_data": []}, "user_data an object"),
        ({"a": ([[1, 2]], [0]), "b": ([[1]], [0])}, {}, r"user 'b': inputs have the shape \(1,\), but those"),
        ({"a": ([[1, 2], [1]], [0, 0])}, {}, "user 'a'"),
        ({"a": ([[1, None]], [0])}, {}, "user 'a': not all are finite numbers"),
        ({"a": ([[1, 1e39]], [0])}, {}, "user 'a': not all are numbers that a float32 holds"),
        ({"a": (["ab", "a"], [0, 0])}, {}, "user 'a': some are texts, but not all are texts of one length"),
        ({"a": (["a~"], [0])}, {}, "user 'a': the character '~' is not among the 80 letters"),
        ({"a": ([], [])}, {}, "no user has an example"),
    ],
)
def test_what_is_wrong_is_told_with_its_user(tmp_path: Path, users: Any, more: Any, fault: str) -> None:
    with pytest.raises(BadData, match=fault):
        read_leaf(write(tmp_path, users, **more))


def test_a_user_who_is_not_counted_is_told(tmp_path: Path) -> None:
    content = {"users": ["a"], "num_samples": [1], "user_data": {name: {"x": [[1]], "y": [0]} for name in "ab"}}
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(BadData, match=r"a\.json: user 'b' is in user_data, but not in users"):
        read_leaf(tmp_path)


def test_whole_numbers_that_no_int64_holds_stay_what_they_are(tmp_path: Path) -> None:
    owned = read_leaf(write(tmp_path, {"a": ([[1.0]], [1e20])}))
    assert owned("a", "train")[0][1].item() == pytest.approx(1e20)


def test_a_number_of_more_digits_than_python_reads_is_told_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'{{"users": [{"9" * 5000}]}}')
    with pytest.raises(BadData, match=r"a\.json: is no JSON: Exceeds the limit"):
        read_leaf(tmp_path)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="there is no JSON file in it"):
        read_leaf(tmp_path)
    (tmp_path / "a.json").write_text('{"users": [')
    with pytest.raises(BadData, match=r"a\.json: is no JSON"):
        read_leaf(tmp_path)
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(BadData, match="must be an object with users, num_samples and user_data"):
        read_leaf(tmp_path)
    write(tmp_path, USERS, name="a.json")
    write(tmp_path, USERS, name="b.json")
    with pytest.raises(BadData, match=r"b\.json: user 'f1' is in a\.json too"):
        read_leaf(tmp_path)
