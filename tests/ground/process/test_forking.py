"""A forked process reads files that its parent had open without moving anyone's place in them."""

import multiprocessing
import os
import sqlite3
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from atoll.ground.process.forking import reopen_files

NUMBERS = 40


def numbers(folder: Path) -> Path:
    path = folder / "numbers"
    path.write_bytes(b"".join(number.to_bytes(4, "little") for number in range(NUMBERS)))
    return path


def seek_and_read(file: Any, number: int) -> int:
    """Read a number as a data set does, slowly enough for another process to come between."""
    file.seek(4 * number)
    time.sleep(0.001)
    return int.from_bytes(file.read(4), "little")


def read_all(connection: Connection, read: Callable[[int], int]) -> None:
    reopen_files()
    connection.send([read(number) for number in range(NUMBERS)])


def in_two_processes(read: Callable[[int], int]) -> list[list[int]]:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    children = [context.Process(target=read_all, args=(sender, read)) for _, sender in pipes]
    for child in children:
        child.start()
    try:
        return [receiver.recv() for receiver, _ in pipes]
    finally:
        for child in children:
            child.join()


@pytest.mark.real
def test_two_children_read_each_number_at_its_place(tmp_path: Path) -> None:
    with numbers(tmp_path).open("rb", buffering=0) as file:
        assert seek_and_read(file, 3) == 3
        assert in_two_processes(lambda number: seek_and_read(file, number)) == [[*range(NUMBERS)]] * 2
        assert file.tell() == 16, "the parent's place"


@pytest.mark.real
def test_two_children_read_a_database_that_their_parent_has_open(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "rows.db") as database:
        database.execute("create table r (i integer primary key, x integer, filling blob)")
        database.executemany("insert into r values (?, ?, zeroblob(3000))", [(i, i) for i in range(NUMBERS)])
        database.commit()

        def read(number: int) -> int:
            return int(database.execute("select x from r where i = ?", (number,)).fetchone()[0])

        assert in_two_processes(read) == [[*range(NUMBERS)]] * 2


def test_a_file_keeps_its_place_and_a_written_one_stays_shared(tmp_path: Path) -> None:
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    also = os.dup(log)
    try:
        with numbers(tmp_path).open("rb", buffering=0) as file:
            file.seek(8)
            reopen_files()
            assert int.from_bytes(file.read(4), "little") == 2
        os.write(log, b"one")
        os.write(also, b", two")
        assert (tmp_path / "log").read_bytes() == b"one, two"
    finally:
        os.close(log)
        os.close(also)
