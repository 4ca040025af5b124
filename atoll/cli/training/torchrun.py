"""`python -m atoll.cli.training.torchrun`: torchrun, silent about what our ranks tell in their own words."""

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def quietly(arguments: list[str]) -> int:
    """Run torchrun; 0 when every rank ended well."""
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        main(arguments)
    except (ChildFailedError, SignalException):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(quietly(sys.argv[1:]))
