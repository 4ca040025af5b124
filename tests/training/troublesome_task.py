"""A task without torch that does what the settings of a round say; most of it is trouble."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from atoll import Instructions, Trained

libc = ctypes.PyDLL(None)
"""The C library, called with the GIL held, as a badly written extension does."""


def train_until_the_deadline(instructions: Instructions) -> float:
    mark(instructions)
    steps = 0
    while steps < 2000 and (steps == 0 or not instructions.deadline.passed()):
        time.sleep(0.01)
        steps += 1
    return steps / 2000


def start_a_child(instructions: Instructions) -> float:
    with open(instructions.local["file"], "w") as file:
        file.write(str(subprocess.Popen(["sleep", "600"]).pid))
    return 1.0


def print_everywhere(instructions: Instructions) -> float:
    print('{"error": "not", "detail": "an answer"}')
    print("to stderr", file=sys.stderr)
    os.write(1, b"to fd 1\n")
    subprocess.run(["echo", "from a child"], check=True)
    assert sys.stdin.read() == ""
    assert os.read(0, 10) == b""
    return 1.0


def hang(instructions: Instructions, sleep: Callable[[int], Any]) -> None:
    mark(instructions)
    sleep(600)


def mark(instructions: Instructions) -> None:
    """Tell the test that the training has begun."""
    with open(instructions.local["file"] + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.replace(instructions.local["file"] + ".part", instructions.local["file"])


DEEDS: dict[str, Any] = {
    "work": lambda instructions: 1.0,
    "wait": train_until_the_deadline,
    "exit": lambda instructions: (print("farewell", flush=True), os._exit(3)),
    "sys.exit": lambda instructions: sys.exit("enough"),
    "raise": lambda instructions: instructions.local["missing"],
    "full": lambda instructions: os.write(os.open("/dev/full", os.O_WRONLY), b"x"),
    "segfault": lambda instructions: ctypes.string_at(0),
    "abort": lambda instructions: os.kill(os.getpid(), signal.SIGABRT),
    "sleep": lambda instructions: hang(instructions, time.sleep),
    "gil": lambda instructions: hang(instructions, libc.sleep),
    "print": print_everywhere,
    "say": lambda instructions: print("one line") or print("another", file=sys.stderr) or 1.0,
    "child": start_a_child,
}


class Trouble:
    sites = ("here",)

    def initial(self, seed: int) -> dict[str, Any]:
        return {"w": np.full(3, float(seed), np.float32)}

    def train(self, parameters: dict[str, Any], instructions: Instructions) -> Trained:
        deed = instructions.local.get("do", "work")
        if deed in DEEDS:
            work = DEEDS[deed](instructions)
            update = {"w": np.full(3, instructions.seed, np.float32)}
            return Trained(update, 5, {"steps": (float(instructions.round_id), 1)}, work)
        bad: dict[str, Any] = {
            "nan": Trained({"w": np.full(3, np.nan, np.float32)}, 5),
            "shape": Trained({"w": np.zeros(4, np.float32)}, 5),
            "float64": Trained({"w": np.zeros(3)}, 5),
            "nothing": None,
            "counts": Trained({"w": np.zeros(3, np.float32)}, 0, {"m": (None,)}, 2.0),  # type: ignore[dict-item]
        }
        return bad[deed]  # type: ignore[no-any-return]

    def num_examples(self, site: str) -> int:
        return 5

    def evaluate(self, parameters: dict[str, Any], *, split: str, site: str | None) -> Any:
        return None if split == "test" else {"sum": (parameters["w"].sum(), 1 if site is None else 2)}


class Half:
    def initial(self, seed: int) -> dict[str, Any]:
        return {"w": np.zeros(3)}

    def train(self, parameters: dict[str, Any], instructions: Instructions) -> Trained:
        raise NotImplementedError


task = Trouble()
half = Half()
