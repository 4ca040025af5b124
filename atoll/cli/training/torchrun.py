"""`python -m atoll.cli.training.torchrun`: torchrun without its own report of failed ranks, which Atoll's replaces."""

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run_quietly(arguments: list[str]) -> int:
    """Run torchrun; return 0 if every rank has ended with 0, else 1."""
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        main(arguments)
    except (ChildFailedError, SignalException):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_quietly(sys.argv[1:]))
