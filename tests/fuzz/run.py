"""Feeds a parser with mutated inputs: it accepts each, or refuses it with an error that it documents."""

import base64
import logging
import resource
import traceback
import tracemalloc
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS

NUM = 10_000
"""Inputs of each parser in the suite; `make fuzz` has ten million."""

MEMORY_MAX = 256 * 2**20
"""By how much the address space may grow, whatever comes [bytes]."""

PEAK_MAX = 4 * 2**20
"""What the parsing of one input of a few hundred bytes may use [bytes]."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a number of inputs."""

    accepted: int
    refused: int


class Found(AssertionError):
    """An input that a parser neither accepts nor refuses as it says."""


def inputs(name: str, seed: int, begin: int, end: int) -> Iterator[bytes]:
    """Inputs of a target, by its name and a seed."""
    target = TARGETS[name]
    return map(target.wrap, mutated(target.corpus, target.tokens, f"{name} {seed}", begin, end))


def feed(name: str, given: Iterable[bytes]) -> Outcome:
    """Let a target parse.

    Raises:
        Found: an error that is not documented; the text has the input and how to see it again.
    """
    parse, errors = TARGETS[name].parse, TARGETS[name].errors
    accepted = refused = 0
    with _quiet():
        for data in given:
            try:
                parse(data)
                accepted += 1
            except errors:
                refused += 1
            except Exception as error:  # RecursionError and MemoryError are among them
                encoded = base64.b64encode(data).decode()
                again = f'python -m tests.fuzz --target "{name}" --replay {encoded}'
                raise Found(f"{name}: {traceback.format_exc()}\nagain: {again}") from error
    return Outcome(accepted, refused)


@contextmanager
def _quiet() -> Iterator[None]:
    """A warning, of ours or of a library, refuses nothing."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """A block in which this process can take no more than so much more memory: a MemoryError is a finding."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MEMORY_MAX
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def peak_bytes(name: str, given: Iterable[bytes]) -> int:
    """The most that parsing takes of Python's memory [bytes]."""
    given = list(given)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        feed(name, given)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


Part = tuple[str, int, int, int]
"""A target's name, a seed, and which inputs."""


def feed_part(part: Part) -> Outcome | str:
    """In a process of its own; a text is what was found."""
    name, seed, begin, end = part
    try:
        with bounded_memory():
            return feed(name, inputs(name, seed, begin, end))
    except Found as found:
        return f"{found}\n(--seed {seed}, inputs {begin}..{end})"
