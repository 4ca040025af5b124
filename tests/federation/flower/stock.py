"""A run of an app by Flower itself, as processes on loopback: its SuperLink with its simulation, or with SuperNodes."""

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.processes import free_address
from tests.federation.processes import ended_after
from tests.waiting import BOUND_S

BIN = Path(sys.executable).parent
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class Stock:
    """A SuperLink in a folder, which is the current one of a ServerApp.

    Args:
        folder: the folder, which is made.
        nodes: the number of nodes.
        simulates: whether Flower's simulation runs them; otherwise each is a SuperNode.
    """

    def __init__(self, folder, nodes, *, simulates):
        self.folder, self.running, self.address = folder, {}, free_address()
        self.nodes, self.simulates = nodes, simulates
        home = folder / "home"
        home.mkdir(parents=True)
        options = f"options.num-supernodes = {nodes}\n" if simulates else ""
        (home / "config.toml").write_text(f'[superlink.here]\naddress = "{self.address}"\ninsecure = true\n{options}')
        path = f"{BIN}:{os.environ['PATH']}"
        self._environment = {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path, "PYTHONPATH": ""}

    def start(self):
        """Start the SuperLink, and with it the SuperNodes unless it simulates them."""
        host, _, port = self.address.rpartition(":")
        kind = ["--simulation"] if self.simulates else []
        self._start("superlink", *kind, "--host", host, "--port", port, "--disable-runtime-dependency-installation")
        self._wait_for("superlink", "running on")
        for place in range(0 if self.simulates else self.nodes):
            config = f"partition-id={place} num-partitions={self.nodes}"
            port = free_address().rpartition(":")[2]
            self._start("supernode", "--superlink", self.address, "--port", port, "--node-config", config, place=place)

    def _start(self, program, *options, place=""):
        command = [BIN / f"flower-{program}", "--insecure", *options]
        with (self.folder / f"{program}{place}.log").open("ab") as log:
            self.running[f"{program}{place}"] = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, env=self._environment
            )

    def _wait_for(self, name, words):
        log, until = self.folder / f"{name}.log", time.monotonic() + BOUND_S
        while words not in log.read_text().lower():
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)

    def run(self, app, config):
        """Run an app to its end; its output is in run.log."""
        values = " ".join(f"{name}={value}" for name, value in config.items())
        command = [BIN / "flwr", "run", app, "here", "--stream", "--run-config", values]
        done = subprocess.run(command, env=self._environment, cwd=self.folder, capture_output=True, text=True)
        (self.folder / "run.log").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, done.stdout + done.stderr


def run_by_flower(app, folder, nodes, *, simulates=True, **config):
    """Run an app with Flower's own simulation, or with SuperNodes; its files are in `folder`."""
    with ended_after(Stock(folder, nodes, simulates=simulates)) as it:
        it.start()
        it.run(app, config)
