"""What a person sees of a training: a line that lives where there is a terminal, a line now and then elsewhere."""

from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from atoll.cli.printing import seconds
from atoll.parallel.trainer.logs import Event, Report
from atoll.protocol.printable import printable_size

EVERY_S = 1.0
"""Where there is no terminal, steps are told of no oftener."""


def progress(stream: TextIO, say: Callable[[str], None]) -> Report:
    """A report for a person.

    Args:
        stream: where it goes; if it is a terminal, the line lives.
        say: prints one line there otherwise.
    """
    return _Live(stream).report if stream.isatty() else _lines(say)


def _lines(say: Callable[[str], None]) -> Report:
    total, told_at = 0, -EVERY_S

    def report(event: Event) -> None:
        nonlocal total, told_at
        total = event.get("steps", total)
        if event["event"] == "step":
            if event["seconds"] - told_at >= EVERY_S:
                told_at = event["seconds"]
                say(f"step {event['step']}/{total}  {speed(event)}")
        elif text := about(event):
            say(text)

    return report


class _Live:
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
    """What a step has shown."""
    rate = f"{event['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in event else f"{event['examples_per_s']:,.0f}/s"
    parts = [f"loss {event['loss']:.4f}", rate, printable_size(event["memory_bytes"])]
    if "mfu" in event:
        parts.append(f"MFU {event['mfu']:.1%}")
    if "noise_scale" in event:
        parts.append(f"critical batch about {event['noise_scale']:.0f}")
    return "  ".join([*parts, f"{seconds(event['seconds_left'])} left"])


def about(event: Event) -> str | None:
    """One line on what is no step; None where there is nothing to say."""
    if event["event"] == "begin" and event["step"]:
        return f"going on from step {event['step']}"
    if event["event"] == "evaluation":
        values = {name: value for name, value in event.items() if name not in ("event", "step", "epoch")}
        return f"step {event['step']}, epoch {event['epoch']:.4g}: {shown(values)}" if values else None
    return None


def shown(values: dict[str, float | None]) -> str:
    """Metrics in one line."""
    return ", ".join(f"{name} {'-' if value is None else f'{value:.4f}'}" for name, value in values.items())
