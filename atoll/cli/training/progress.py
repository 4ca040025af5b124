"""The progress of a training: a progress bar on a terminal, elsewhere at most one line a second."""

from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from atoll.cli.printing import seconds
from atoll.ground.printable import printable_size
from atoll.parallel.trainer.logs import Event, Report

EVERY_S = 1.0
"""Least seconds between two lines about steps, where the output is not a terminal."""


def progress(stream: TextIO, say: Callable[[str], None]) -> Report:
    """Return a function that shows the events of a training.

    Args:
        stream: the output; if it is a terminal, a progress bar is drawn on it.
        say: prints one line, where the output is not a terminal.
    """
    return _ProgressBar(stream).report if stream.isatty() else _lines(say)


def _lines(say: Callable[[str], None]) -> Report:
    total, shown_at = 0, -EVERY_S

    def report(event: Event) -> None:
        nonlocal total, shown_at
        total = event.get("steps", total)
        if event["event"] == "begin":  # again, where ranks were restarted
            shown_at = -EVERY_S
        if event["event"] == "step":
            if event["seconds"] - shown_at >= EVERY_S:
                shown_at = event["seconds"]
                say(f"step {event['step']}/{total}  {speed(event)}")
        elif text := about(event):
            say(text)

    return report


class _ProgressBar:
    def __init__(self, stream: TextIO) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self._bar.add_task("")

    def report(self, event: Event) -> None:
        if event["event"] == "begin":
            self._bar.update(self._task, total=event["steps"], completed=event["step"])
            self._bar.start()
        if event["event"] == "step":
            self._bar.update(self._task, completed=event["step"], description=speed(event))
        elif text := about(event):
            self._bar.console.print(text, highlight=False, soft_wrap=True)
        if event["event"] == "end":
            self._bar.stop()


def speed(event: Event) -> str:
    """Return a step's loss, rate, memory and time left, with MFU and critical batch size where they are measured."""
    rate = f"{event['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in event else f"{event['examples_per_s']:,.0f}/s"
    parts = [f"loss {event['loss']:.4f}", rate, printable_size(event["memory_bytes"])]
    if "mfu" in event:
        parts.append(f"MFU {event['mfu']:.1%}")
    if "noise_scale" in event:
        parts.append(f"critical batch about {event['noise_scale']:.0f}")
    return "  ".join([*parts, f"{seconds(event['seconds_left'])} left"])


def _of_beginning(event: Event) -> Iterator[str]:
    if "start" in event:
        yield f"the model starts from {event['train']['start']}: {event['start']}"
    if "unused" in event:
        yield "the task's algorithm is that of a federation: a centralized training calls none of its hooks"
    if event["step"]:
        yield f"resuming from step {event['step']}"


def about(event: Event) -> str | None:
    """Return the lines for a beginning or an evaluation; None for other events."""
    if event["event"] == "begin":
        return "\n".join(_of_beginning(event)) or None
    if event["event"] == "evaluation":
        values = {name: value for name, value in event.items() if name not in ("event", "step", "epoch")}
        return f"step {event['step']}, epoch {event['epoch']:.4g}: {shown(values)}" if values else None
    return None


def shown(values: dict[str, float | None]) -> str:
    """Return metrics as one line."""
    return ", ".join(f"{name} {'-' if value is None else f'{value:.4f}'}" for name, value in values.items())
