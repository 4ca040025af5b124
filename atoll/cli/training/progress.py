"""The progress of a centralized training: a bar on a terminal, lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from atoll.cli.printing import seconds
from atoll.cli.waiting import Progress
from atoll.ground.printable import printable_size
from atoll.parallel.trainer.logs import Event, Report


@contextmanager
def progress(stream: TextIO, say: Callable[[str], None]) -> Iterator[Report]:
    """Yield a function that shows the events of a training.

    Args:
        stream: the output; if it is a terminal, a progress bar is drawn on it.
        say: prints one line, where the output is not a terminal.
    """
    total = 0
    with Progress("step", stream, say) as bar:

        def report(event: Event) -> None:
            nonlocal total
            total = event.get("steps", total)
            if event["event"] == "begin":
                bar.begin(total, event["step"])
            if event["event"] == "step":
                bar.show(event["step"], total, speed(event), at=time.monotonic())
            elif text := about(event):
                bar.tell(text)

        yield report


def speed(event: Event) -> str:
    """Describe a step in one line: loss, rate, memory, time left; MFU and critical batch size if measured."""
    rate = f"{event['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in event else f"{event['examples_per_s']:,.0f}/s"
    loss = [f"loss {event['loss']:.4f}"] if "loss" in event else []  # a private training tells none
    parts = [*loss, rate, printable_size(event["memory_bytes"])]
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
    """Describe the event of a beginning or an evaluation in lines; None for other events."""
    if event["event"] == "begin":
        return "\n".join(_of_beginning(event)) or None
    if event["event"] == "evaluation":
        values = {name: value for name, value in event.items() if name not in ("event", "step", "epoch")}
        return f"step {event['step']}, epoch {event['epoch']:.4g}: {shown(values)}" if values else None
    return None


def shown(values: dict[str, float | None]) -> str:
    """Format metrics in one line."""
    return ", ".join(f"{name} {'-' if value is None else f'{value:.4f}'}" for name, value in values.items())
