"""The faults of ranks, as files in a folder that the supervisor reads when ranks have ended. Without torch."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFault:
    """The reason why a rank could not continue."""

    rank: int
    kind: str
    """The kind of error, in the supervisor's words: a FailureReason, or an exit code."""
    detail: str
    """The message for a person: the end of a traceback, or one of our sentences."""
    step: int = 0
    """The steps that were made in the training."""
    is_lost_peer: bool = False
    """Another rank, which died or hung, caused it."""

    def repeats(self, earlier: "RankFault | None") -> bool:
        """Return whether it is an earlier fault at the same step, so that of the user's code."""
        if earlier is None or self.is_lost_peer or earlier.is_lost_peer:
            return False
        return (self.step, _last_line(self.detail)) == (earlier.step, _last_line(earlier.detail))

    def encode(self) -> str:
        """Return the fault as text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> "RankFault":
        """Return the fault that `encode` has written."""
        return cls(**json.loads(text))

    def write(self, folder: Path) -> None:
        """Write the fault into a folder; complete or not at all."""
        part = folder / f"fault.{self.rank}.part"
        part.write_text(self.encode(), "utf-8")
        os.replace(part, folder / f"fault.{self.rank}.json")


def take_faults(folder: Path) -> list[RankFault]:
    """Return the faults in a folder, oldest first, and delete them."""
    found = []
    for path in sorted(folder.glob("fault.*.json"), key=lambda path: path.stat().st_mtime_ns):
        found.append(RankFault.decode(path.read_text("utf-8")))
        path.unlink()
    return found


def cause(faults: Sequence[RankFault]) -> RankFault | None:
    """Return the fault that is behind those of several ranks: one that a rank caused itself; None: there is none."""
    own = [fault for fault in faults if not fault.is_lost_peer]
    return own[0] if own else None


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
