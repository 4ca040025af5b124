"""The account of a private training's steps in its folder, which no crash and no lost checkpoint refunds.

privacy.json    {"steps": charged in all, "at": the step up to which, "most": the largest of these, "repeats": how often
                charged steps were begun again}

A step is charged before anything that follows from it leaves the process: a checkpoint, an evaluation, a model. What
was computed after the last charge is lost with the process, and is computed again. Steps that are done again after they
were charged, as after a damaged checkpoint, are charged again, and have other samples and noise.

On several ranks the first one reads and writes the file, and all of them count the same.
"""

import json
from pathlib import Path
from typing import Any

from atoll.ground.durable import write_atomically
from atoll.ground.printable import count_of
from atoll.parallel.checkpoint.ranks import Ranks

FILE = "privacy.json"


class AccountBroken(ValueError):
    """The account cannot be read, or is missing where steps were done; nothing may be trained."""


class Account:
    """The charged steps of a training, durable.

    Args:
        folder: the folder of the training.
        described: the terms' mechanism; an account of another one is refused.
        ranks: the ranks of the training, all of which construct it at the same point; None: one process.

    Raises:
        AccountBroken: the file is damaged, or is of another mechanism; on every rank.
    """

    def __init__(self, folder: Path, described: dict[str, Any], ranks: Ranks | None = None) -> None:
        self._path, self._described, self._ranks = folder / FILE, described, ranks
        self.steps = 0
        """Steps that are charged, each time that they were done."""
        self.repeats = 0
        """How often steps that were charged were begun again."""
        self._at = self._most = 0
        faults = list[str]()
        self._is_new = not self._path.exists()
        if self._is_first and not self._is_new:
            try:
                self._read()
            except AccountBroken as error:
                faults.append(str(error))
        if ranks is not None:
            ranks.raise_if_any(faults, AccountBroken)
            numbers = [self._is_new, self.steps, self._at, self._most, self.repeats]
            self._is_new, self.steps, self._at, self._most, self.repeats = ranks.gather(numbers)[0]
        elif faults:
            raise AccountBroken(faults[0])

    @property
    def _is_first(self) -> bool:
        return self._ranks is None or self._ranks.is_first

    def _read(self) -> None:
        try:
            found = json.loads(self._path.read_text("utf-8"))
            self.steps, self._at, self._most = found["steps"], found["at"], found["most"]
            self.repeats, described = found.get("repeats", 0), found["mechanism"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AccountBroken(
                f"{self._path} cannot be read ({error}), so the steps that were done are unknown: put it back, or "
                "begin in another folder (--out)"
            ) from error
        numbers = (self._at, self._most, self.steps)
        are_numbers = all(type(number) is int and number >= 0 for number in (*numbers, self.repeats))
        if not are_numbers or sorted(numbers) != [*numbers]:
            raise AccountBroken(
                f"{self._path} has impossible numbers of steps: put it back, or begin in another folder"
            )
        if described != self._described:
            raise AccountBroken(
                f"{self._path} has {count_of(self.steps, 'step')} of another mechanism ({described}): begin in another "
                "folder (--out)"
            )

    def begin(self, step: int) -> None:
        """Begin at the step of a checkpoint, or 0; steps that were charged after it will be charged again.

        Raises:
            AccountBroken: steps were done, and the account is missing.
        """
        if self._is_new and step:
            raise AccountBroken(
                f"{self._path} is missing beside a checkpoint of step {step}, so the steps that were done are unknown: "
                "put it back, or begin in another folder (--out)"
            )
        if step > self._most:
            raise AccountBroken(
                f"{self._path} ends at step {self._most}, and the checkpoint is of step {step}: put the file back, or "
                "begin in another folder (--out)"
            )
        self.repeats += step < self._at
        self._at = step
        self._write()

    def charge(self, step: int) -> None:
        """Charge the steps up to this one, durably; every rank must call it, and none returns before it is."""
        if step > self._at:
            self.steps, self._at, self._most = self.steps + step - self._at, step, max(step, self._most)
            self._write()

    def _write(self) -> None:
        if self._is_first:
            numbers = {"steps": self.steps, "at": self._at, "most": self._most, "repeats": self.repeats}
            text = json.dumps({**numbers, "mechanism": self._described}, indent=2)
            write_atomically(self._path, f"{text}\n".encode())
        if self._ranks is not None:
            self._ranks.gather(None)
