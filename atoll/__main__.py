"""`python -m atoll`, and `torchrun ... -m atoll train TASK`: the program `atoll` where it has to be a module."""

from atoll.cli.main import run

run()
