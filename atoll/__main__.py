"""The program `atoll` as a module: `python -m atoll`, and `torchrun ... -m atoll train TASK`."""

from atoll.cli.main import run

run()
