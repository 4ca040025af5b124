"""The facts of a task's sites in a file, for the other cells of a sweep and for a resumed run.

They are reused only while everything that they depend on is unchanged: sites, options and settings of the task, the
sources of its modules, the environment, the versions of the libraries, and each file and folder that Python opened
before they were read, by its size and times. Still, some sites are read again as a check, and must be unchanged; and a
training on a different number of examples ends the run.
"""

import hashlib
import io
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.ground.durable import write_atomically
from atoll.ground.file_lock import exclusively
from atoll.simulations.engines.processes.user_files import sources
from atoll.simulations.populations.facts import READ_TWICE, Facts, SiteFacts, facts_of_sites, read_sites
from atoll.simulations.populations.opened_files import OPENED, SHARED, Mark, mark_of
from atoll.task.task import Task

FORMAT = 2

NAME = "sites-{}.npz"
"""Name of the file, with the beginning of the key."""

FILES_MAX = 500_000
"""Maximum number of files that kept facts may depend on."""

NEUTRAL = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "COLUMNS", "LINES", "OMP_NUM_THREADS"})
"""Environment variables on which no data depends."""

COUNTED, TEXT, LATER = range(3)
"""Kinds of knowledge of a site's labels: their numbers, why there are none, nothing yet."""


class KeptFacts:
    """Facts of a task's sites (sizes, labels, kinds of rows) that are kept in a file.

    Args:
        folder: the folder of the run; a sweep's variable `SHARED` replaces it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._kept_in = folder, Path(os.environ.get(SHARED) or folder)
        self._to_save: tuple[str, Facts] | None = None

    def read(self, task: Task) -> Facts:
        """Return the facts of a task's sites: kept ones if they are still valid, else read again."""
        if not OPENED.is_on:
            return facts_of_sites(task)
        key = key_of(task)
        if (kept := self._load(key, len(task.sites))) is not None and _hold(kept, task):
            return kept
        facts = facts_of_sites(task)
        self._to_save = key, facts
        return facts

    def save(self) -> None:
        """Write newly read facts, once the folder is known to belong to the run."""
        if self._to_save is None:
            return
        key, facts = self._to_save
        mine = {str(self._kept_in.resolve()), str(self._folder.resolve())}
        installed = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)} | {"/proc", "/sys", "/dev"}
        files = [path for path in OPENED.paths if not _is_code(path) and not _is_below(path, mine | installed)]
        if len(files) <= FILES_MAX:
            content = _packed(key, facts, [(path, mark_of(path)) for path in files])
            folder = os.open(self._kept_in, os.O_RDONLY | os.O_CLOEXEC)
            try:
                with exclusively(folder):  # two cells of a sweep may have read the same facts at the same time
                    write_atomically(self._path(key), content)
            finally:
                os.close(folder)

    def _path(self, key: str) -> Path:
        return self._kept_in / NAME.format(key[:16])

    def _load(self, key: str, num_sites: int) -> Facts | None:
        try:
            found, facts, marks = _unpacked(self._path(key))
        except Exception:  # any error: a file that cannot be read counts as missing
            return None
        is_same = found == key and len(facts.train) == num_sites
        return facts if is_same and all(mark_of(path) == mark for path, mark in marks) else None


def key_of(task: Task) -> str:
    """Return the digest of everything that the facts of a task's sites depend on, except files."""
    data: Any = getattr(task.data, "function", task.data)
    environment = {name: value for name, value in os.environ.items() if name not in NEUTRAL}
    parts = [
        FORMAT,
        [sys.version, torch.__version__, np.__version__, version("atoll")],
        [getattr(data, "__module__", ""), getattr(data, "__qualname__", type(data).__qualname__)],
        list(task.sites),
        [repr(sorted(getattr(task, name, {}).items())) for name in ("options", "settings", "site_settings")],
        [[name, source.path, hashlib.sha256(source.code).hexdigest()] for name, source in sorted(sources().items())],
        sorted((name, value) for name, value in environment.items() if not name.startswith("ATOLL_")),
        str(Path.cwd()),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _hold(kept: Facts, task: Task) -> bool:
    """Return whether a few sites, read again, are unchanged."""
    places = range(0, len(task.sites), max(1, len(task.sites) // READ_TWICE))
    known = [SiteFacts(int(kept.train[k]), int(kept.test[k]), kept.labels[k], kept.rows[k]) for k in places]
    return read_sites(task, [task.sites[k] for k in places]) == known


def _is_code(path: str) -> bool:
    return path.endswith(".pyc") or "site-packages" in path.split(os.sep)


def _is_below(path: str, folders: set[str]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def _packed(key: str, facts: Facts, marks: list[tuple[str, Mark]]) -> bytes:
    kinds = [LATER if own is None else TEXT if isinstance(own, str) else COUNTED for own in facts.labels]
    counted = [own for own in facts.labels if own is not None and not isinstance(own, str)]
    texts, forms = [own for own in facts.labels if isinstance(own, str)], sorted(set(facts.rows))
    header = json.dumps({"key": key, "texts": texts, "forms": forms, "files": marks})
    number = {form: place for place, form in enumerate(forms)}
    memory = io.BytesIO()
    np.savez(
        memory,
        header=np.frombuffer(header.encode(), np.uint8),
        train=facts.train,
        test=facts.test,
        rows=np.array([number[form] for form in facts.rows], np.int32),
        kinds=np.array(kinds, np.int8),
        lengths=np.array([len(labels) for labels, _ in counted], np.int64),
        labels=_joined(labels for labels, _ in counted),
        counts=_joined(counts for _, counts in counted),
    )
    return memory.getvalue()


def _joined(lists: Any) -> np.ndarray[Any, Any]:
    return np.fromiter((number for each in lists for number in each), np.int64)


def _unpacked(path: Path) -> tuple[str, Facts, list[tuple[str, Mark]]]:
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
        stored = {name: file[name] for name in file.files}
    header = json.loads(stored["header"].tobytes())
    labels, counts = stored["labels"].tolist(), stored["counts"].tolist()
    texts, lengths, at = iter(header["texts"]), iter(stored["lengths"].tolist()), 0
    every: list[tuple[list[int], list[int]] | str | None] = []
    for kind in stored["kinds"].tolist():
        if kind == COUNTED:
            end = at + next(lengths)
            every.append((labels[at:end], counts[at:end]))
            at = end
        else:
            every.append(next(texts) if kind == TEXT else None)
    marks = [(name, None if mark is None else tuple(mark)) for name, mark in header["files"]]
    rows = tuple(header["forms"][number] for number in stored["rows"].tolist())
    return header["key"], Facts(stored["train"], stored["test"], tuple(every), rows, are_kept=True), marks
