"""Logs of a simulation, called once for each ended round: a line of JSON, and TensorBoard's scalars."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from atoll.parallel.trainer.logs import has_tensorboard, json_log

__all__ = ["Log", "NoTensorBoard", "json_log", "scalars", "tensorboard"]

Log = Callable[[dict[str, Any]], None]
"""Function that logs one round, given its line of `rounds.jsonl`."""

SKIPPED = frozenset({"round", "version", "fates", "failures", "client_values", "train_values"})


class NoTensorBoard(RuntimeError):
    """The extra `tensorboard` is not installed."""


def tensorboard(folder: Path) -> Log:
    """Return a log that writes every number of a round to TensorBoard's files.

    The first logged round replaces that round and later ones of an interrupted run.

    Raises:
        NoTensorBoard: the extra `tensorboard` is not installed.
    """
    if not has_tensorboard():
        raise NoTensorBoard("the package tensorboard is not installed: pip install 'atoll[tensorboard]'")
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = None

    def log(line: dict[str, Any]) -> None:
        nonlocal writer
        writer = writer or SummaryWriter(str(folder), purge_step=line["round"])
        for name, value in scalars(line):
            writer.add_scalar(name, value, line["round"])
        writer.flush()

    return log


def scalars(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a round by a path such as `server/accuracy`, without those of single clients."""
    for name, value in line.items():
        if name in SKIPPED or value is None or isinstance(value, bool):
            continue
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)
