"""LEAF's JSON: FEMNIST, Synthetic, Shakespeare and all others in its layout; each user is an owner.

    {"users": ["f0001", ...],
     "num_samples": [41, ...],
     "user_data": {"f0001": {"x": [...], "y": [...]}, ...}}

Source:
    Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018 (arXiv 1812.01097), and its repository.
"""

import json
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from atoll.ground.printable import count_of
from atoll.ground.text_files import NotText, text_of
from examples.datasets.folder import BadData, NoData, read_checked
from examples.datasets.owned import FLOAT32_MAX, Ints, Owned, by_owner

LETTERS = "".join(sorted("\n !\"&'(),-.:;>?[]}" + string.digits + string.ascii_letters))
"""The 80 characters of LEAF's Shakespeare; a character's code is its index in them."""


def read_leaf(folder: Path, *, letters: str = LETTERS, test_fraction: float = 0.1, min_examples: int = 1) -> Owned:
    """Read all JSON files of a data set, each user an owner.

    Numbers become tensors, whole ones of a target int64 and all others float32; a text becomes the codes of its
    characters, a target of one character its code.

    Args:
        folder: with train/ and test/ as LEAF's split leaves them; or with all_data/, or the files themselves.
        letters: the characters of texts.
        test_fraction: of each user's examples, the last, if LEAF has made no split; as for `by_owner`.
        min_examples: users with fewer to train on are left out.

    Raises:
        NoData: there is no JSON file.
        BadData: a file is not in this layout, or examples differ in shape; with file and user.
    """
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        train, test = ([*_users(folder / split)] for split in ("train", "test"))
        rows = [(split, user, x, y) for split, users in (("train", train), ("test", test)) for user, x, y in users]
        large_enough = {user for user, x, _ in train if len(x) >= min_examples}
        rows = [row for row in rows if row[1] in large_enough]
        return Owned(
            _stacked(folder, [row[1:] for row in rows], letters), _parts([(s, u, len(x)) for s, u, x, _ in rows])
        )
    users = [*_users(folder / "all_data" if (folder / "all_data").is_dir() else folder)]
    owners = [user for user, x, _ in users for _ in x]
    return Owned(_stacked(folder, users, letters), by_owner(owners, test_fraction, min_examples))


User = tuple[str, list[Any], list[Any]]
"""The name, inputs and targets of a user."""


def _users(folder: Path) -> Iterator[User]:
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not paths:
        raise NoData(f"{folder}: there is no JSON file in it")
    seen: dict[str, Path] = {}
    for path in paths:
        for user, x, y in _users_of(path):
            if user in seen:
                raise BadData(f"{path}: user {user!r} is in {seen[user].name} too")
            seen[user] = path
            yield user, x, y


def _users_of(path: Path) -> Iterator[User]:
    try:
        content = json.loads(text_of(read_checked(path), path))
    except NotText as error:
        raise BadData(str(error)) from error
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        raise BadData(f"{path}: is no JSON: {error}") from error
    if not isinstance(content, dict) or not {"users", "num_samples", "user_data"} <= content.keys():
        raise BadData(f"{path}: must be an object with users, num_samples and user_data")
    users, counts, data = content["users"], content["num_samples"], content["user_data"]
    if not (isinstance(users, list) and isinstance(counts, list) and isinstance(data, dict)):
        raise BadData(f"{path}: users and num_samples must be lists, and user_data an object")
    if len(users) != len(counts):
        raise BadData(f"{path}: {count_of(len(users), 'user')}, but {len(counts)} num_samples")
    for user, count in zip(users, counts, strict=True):
        own = data.get(user) if isinstance(user, str) and user else None
        if not isinstance(own, dict) or not isinstance(own.get("x"), list) or not isinstance(own.get("y"), list):
            raise BadData(f"{path}: user {user!r} has no lists x and y in user_data")
        if not len(own["x"]) == len(own["y"]) == count:
            lengths = f"{len(own['x'])} x and {len(own['y'])} y"
            raise BadData(f"{path}: user {user!r} has {lengths}, but num_samples is {count}")
        yield user, own["x"], own["y"]
    if unknown := sorted(data.keys() - set(users)):
        raise BadData(f"{path}: user {unknown[0]!r} is in user_data, but not in users")


def _parts(runs: Sequence[tuple[str, str, int]]) -> dict[str, dict[str, Ints]]:
    """Return the indices of each user's examples from consecutive runs (split, user, number of examples)."""
    parts: dict[str, dict[str, Ints]] = {"train": {}, "test": {}}
    begin = 0
    for split, user, count in runs:
        if count:
            parts[split][user] = np.arange(begin, begin + count)
        begin += count
    return parts


def _stacked(folder: Path, users: Sequence[User], letters: str) -> TensorDataset:
    codes = {letter: code for code, letter in enumerate(letters)}
    shape: tuple[int, ...] | None = None
    inputs, targets = [], []
    for user, x, y in users:
        if not x:
            continue
        try:
            own = _numbers(x, codes)
            if shape not in (None, own.shape[1:]):
                raise BadData(f"inputs have the shape {own.shape[1:]}, but those of the users before {shape}")
            shape = own.shape[1:]
            inputs.append(own.astype(np.int64 if isinstance(x[0], str) else np.float32))
            targets.append(_numbers(y, codes))
        except ValueError as error:
            raise BadData(f"{folder}: user {user!r}: {error}") from error
    if not inputs:
        raise BadData(f"{folder}: no user has an example")
    y_all = np.concatenate(targets)
    wanted = np.int64 if _are_int64(y_all) else np.float32
    return TensorDataset(torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(y_all.astype(wanted)))


def _are_int64(values: "np.ndarray[Any, Any]") -> bool:
    """Return whether all are whole numbers that an int64 holds."""
    is_whole = values.dtype.kind in "iub" or bool((values == np.round(values)).all())
    return is_whole and bool((np.abs(values.astype(np.float64)) < 2.0**63).all())


def _numbers(values: list[Any], codes: dict[str, int]) -> "np.ndarray[Any, Any]":
    """Return one row for each value."""
    if not isinstance(values[0], str):
        found = np.array(values)
        if found.dtype.kind not in "iufb" or not np.isfinite(found).all():
            raise BadData("not all are finite numbers, or lists of them of one length")
        if (np.abs(found.astype(np.float64)) > FLOAT32_MAX).any():
            raise BadData("not all are numbers that a float32 holds")
        return found
    if not all(isinstance(text, str) for text in values) or len(lengths := {len(text) for text in values}) != 1:
        raise BadData("some are texts, but not all are texts of one length")
    if unknown := sorted({letter for text in values for letter in text if letter not in codes}):
        raise BadData(f"the character {unknown[0]!r} is not among the {len(codes)} letters")
    rows = np.array([[codes[letter] for letter in text] for text in values], np.int64)
    return rows[:, 0] if lengths == {1} else rows
