"""The record of a run's answers: an interrupted run repeats its program without computing these answers again.

    replies/<number>.bin                the bytes of the reply to a message
    replies/<number>.own.safetensors    the client's state after it
    replies/<number>.json               the question, and the reply's pieces or the reason for none; written last

An answer depends only on the question: the client, the message, its number and seed, the digest of its content, the
client's state. So a recorded answer is reused for the same question, and any other question is computed, as in an
uninterrupted run. Files whose digests differ were left by a killed process, and are not used.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.ground.durable import write_atomically
from atoll.ground.file_digest import sha256_of_file
from atoll.simulations.engines.engine import Failed
from atoll.simulations.messages.answering import Answer, Engine, Outcome, Question
from atoll.task.arrays import Arrays
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece


class Recorded:
    """Engine that uses the record if possible.

    Args:
        engine: computes all other answers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self.name = engine, engine.name
        self.num_repeated = 0

    def begin(self, question: Question) -> Callable[[], Outcome]:
        """Start to answer a message, if no answer is recorded, and return the function that waits for it."""
        asked = _digest_of(question)
        if (found := _read(question, asked)) is not None:
            self.num_repeated += 1
            return lambda: found
        _path(question).unlink(missing_ok=True)
        begun = self._engine.begin(question)

        def outcome() -> Outcome:
            answered = begun()
            _write(question, asked, answered)
            return answered

        return outcome

    def close(self) -> None:
        """End the processes of the engine."""
        self._engine.close()


def _path(question: Question) -> Path:
    return question.out.with_suffix(".json")


def _path_of_own(question: Question) -> Path:
    return question.out.with_suffix(".own.safetensors")


def _digest_of(question: Question) -> str:
    """Return the SHA-256 of everything that an answer depends on."""
    asked = (question.client_id, question.kind, question.group, question.number, question.seed, question.content.name)
    digest = hashlib.sha256(json.dumps(asked).encode())
    for name, array in sorted((question.own or {}).items()):
        digest.update(json.dumps((name, str(array.dtype), array.shape)).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _write(question: Question, asked: str, outcome: Outcome) -> None:
    row: dict[str, Any] = {"asked": asked}
    if isinstance(outcome, Failed):
        row["failed"] = [outcome.kind, outcome.detail]
    else:
        row["seconds"] = outcome.seconds
        row["pieces"] = [asdict(piece) for piece in outcome.pieces]
        row["own"] = None if outcome.own is None else _written(_path_of_own(question), outcome.own)
    write_atomically(_path(question), json.dumps(row).encode())


def _written(path: Path, own: Arrays) -> str:
    if not own:
        return ""
    safetensors_file.write(path, own, durable=False)
    return sha256_of_file(path)


def _read(question: Question, asked: str) -> Outcome | None:
    """Return the recorded answer to the same question; None: there is none, or its files are incomplete."""
    try:
        row = json.loads(_path(question).read_bytes())
        if row["asked"] != asked:
            return None
        if "failed" in row:
            return Failed(question.client_id, *row["failed"])
        pieces = tuple(_piece(each) for each in row["pieces"])
        own = _own_of(_path_of_own(question), row["own"])
        return Answer(pieces, own, row["seconds"]) if _are_whole(question.out, pieces) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _piece(row: dict[str, Any]) -> Piece:
    return Piece(**{**row, "offsets": tuple(row["offsets"]), "lengths": tuple(row["lengths"])})


def _own_of(path: Path, digest: str | None) -> Arrays | None:
    if not digest:
        return None if digest is None else {}
    if sha256_of_file(path) != digest:
        raise ValueError(f"{path} has changed since it was written")
    return safetensors_file.read(path)


def _are_whole(path: Path, pieces: tuple[Piece, ...]) -> bool:
    """Return whether a reply's file consists exactly of the bytes of its pieces, one after the other."""
    if path.stat().st_size != sum(piece.num_bytes for piece in pieces):
        return False
    with path.open("rb") as file:
        return all(hashlib.sha256(file.read(piece.num_bytes)).hexdigest() == piece.sha256 for piece in pieces)
