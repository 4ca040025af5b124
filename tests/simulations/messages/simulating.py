"""A simulated run of messages in a folder, for tests."""

import json
from pathlib import Path

from atoll.operations.load import load_user_task
from atoll.protocol.settings import load_text, quoted
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.messages.run import opened

TASK = str(Path(__file__).parents[2] / "client" / "work" / "message_task.py") + ":task"
PROGRAM = str(Path(__file__).with_name("talking_program.py"))


def settings(*overrides, program=f"{PROGRAM}:once", task=TASK):
    return load_text(SimulationFile, f"task = {quoted(task)}\nprogram.main = {quoted(program)}", overrides, name="")


def simulate(folder, *overrides, program=f"{PROGRAM}:once", task=TASK):
    """Return the result of a run."""
    file = settings("name=talk", *overrides, program=program, task=task)
    with opened(file, load_user_task(file.task), folder) as federation:
        return federation.run()


def exchanges(folder):
    """Return the lines of the exchanges."""
    return [json.loads(line) for line in (folder / "exchanges.jsonl").read_text().splitlines()]


def digests(lines):
    """Return what each message of each exchange was, and its reply."""
    keys = ("number", "client", "kind", "group", "content", "num_bytes", "fate", "reply", "reply_bytes")
    return [[tuple(message[key] for key in keys) for message in line["messages"]] for line in lines]
