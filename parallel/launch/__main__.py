"""`python -m atoll.parallel.launch SPEC`: the launcher's process, which starts, restarts and ends the ranks.

torch elastic forks each rank from a server that has torch loaded, so that a restart takes 2 to 3 s instead of 11 to 24.
"""

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import uuid

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from atoll.parallel.engine.forked import FROZEN, PRELOAD
from atoll.parallel.launch import entry
from atoll.parallel.launch.spec import Spec

ELASTIC = [
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "atoll.parallel.launch.entry",
]
"""The modules that a rank of torch elastic imports before its function."""

MONITOR_S = 0.1
END_S = 5
"""Seconds between SIGTERM and SIGKILL of the ranks, when the launcher is ended."""


def main(spec: Spec) -> int:
    """Launch the ranks and wait for them; return 0 if every rank has returned, else 1."""
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # its report of failed ranks; Atoll has another
    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
    if spec.is_bound:
        threading.Thread(target=_end_with_stdin, name="end-with-stdin", daemon=True).start()
    os.environ["TORCH_MP_PARALLEL_START"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *ELASTIC, *spec.preload, FROZEN])
    with tempfile.TemporaryDirectory(prefix="elastic-", dir=spec.folder) as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=spec.nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=spec.max_restarts,
            monitor_interval=MONITOR_S,
            start_method="forkserver",
            shutdown_timeout=END_S,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, entry.call)(spec.entry, *spec.args)
        except (ChildFailedError, SignalException):
            return 1
    return 0


def _end_with_stdin() -> None:
    """End this process and all that it has started as soon as its supervisor is gone."""
    while os.read(0, 1 << 10):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(Spec.decode(sys.argv[1])))
