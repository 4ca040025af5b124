"""The account of a private training's steps in its folder, which no crash and no lost checkpoint refunds.

privacy.json    {"steps": charged in all, "at": the step up to which, "most": the largest of these}

A step is charged before anything that follows from it leaves the process: a checkpoint, an evaluation, a model. What
was computed after the last charge is lost with the process, and is computed again with other noise. Steps that are
done again after they were charged, as after a damaged checkpoint, are charged again.
"""

import json
from pathlib import Path
from typing import Any

from atoll.ground.durable import write_atomically
from atoll.ground.printable import count_of

FILE = "privacy.json"


class AccountBroken(ValueError):
    """The account cannot be read, or is missing where steps were done; nothing may be trained."""


class Account:
    """The charged steps of a training, durable.

    Args:
        folder: the folder of the training.
        described: the terms' mechanism; an account of another one is refused.

    Raises:
        AccountBroken: the file is damaged, or is of another mechanism.
    """

    def __init__(self, folder: Path, described: dict[str, Any]) -> None:
        self._path, self._described = folder / FILE, described
        self.steps = 0
        """Steps that are charged, each time that they were done."""
        self._at = self._most = 0
        self._is_new = not self._path.exists()
        if not self._is_new:
            self._read()

    def _read(self) -> None:
        try:
            found = json.loads(self._path.read_text("utf-8"))
            self.steps, self._at, self._most = found["steps"], found["at"], found["most"]
            described = found["mechanism"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AccountBroken(
                f"{self._path} cannot be read ({error}), so the steps that were done are unknown: put it back, or "
                "begin in another folder (--out)"
            ) from error
        numbers = (self._at, self._most, self.steps)
        if not all(type(number) is int and number >= 0 for number in numbers) or sorted(numbers) != [*numbers]:
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
        self._at = step
        self._write()

    def charge(self, step: int) -> None:
        """Charge the steps up to this one, durably."""
        if step > self._at:
            self.steps, self._at, self._most = self.steps + step - self._at, step, max(step, self._most)
            self._write()

    def _write(self) -> None:
        text = json.dumps(
            {"steps": self.steps, "at": self._at, "most": self._most, "mechanism": self._described}, indent=2
        )
        write_atomically(self._path, f"{text}\n".encode())
