"""Parsers of what people and programs write as text: `make fuzz` gives each of them ten million inputs."""

from itertools import islice

import pytest

from tests.fuzz.run import NUM, PEAK_MAX, bounded_memory, feed, inputs, peak_bytes
from tests.fuzz.targets import TARGETS

SEED = 7
OF_TEXT = [
    name
    for name in TARGETS
    if name.startswith(("TOML", "join code", "name", "HTTPS", "checkpoint", "peers of", "list of", "key of"))
]


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TEXT)
def test_only_documented_errors_in_bounded_memory(name: str) -> None:
    with bounded_memory():
        outcome = feed(name, inputs(name, SEED, 0, NUM))
    assert outcome.accepted >= len(TARGETS[name].corpus)
    assert outcome.refused > NUM / 2
    assert peak_bytes(name, islice(inputs(name, SEED, 0, 1000), 200)) < PEAK_MAX
