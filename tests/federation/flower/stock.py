"""A run of an app by Flower itself: its SuperLink with its simulation, as processes on loopback."""

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
    """A SuperLink in a folder, which is the current one of a ServerApp."""

    def __init__(self, folder, nodes):
        self.folder, self.running, self.address = folder, {}, free_address()
        home = folder / "home"
        home.mkdir(parents=True)
        (home / "config.toml").write_text(
            f'[superlink.here]\naddress = "{self.address}"\ninsecure = true\noptions.num-supernodes = {nodes}\n'
        )
        path = f"{BIN}:{os.environ['PATH']}"
        self._environment = {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path, "PYTHONPATH": ""}

    def start(self):
        host, _, port = self.address.rpartition(":")
        command = [BIN / "flower-superlink", "--insecure", "--simulation", "--host", host, "--port", port]
        with (self.folder / "superlink.log").open("ab") as log:
            self.running["superlink"] = subprocess.Popen(
                [*command, "--disable-runtime-dependency-installation"],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self._environment,
            )

    def run(self, app, config):
        """Run an app to its end; its output is in run.log."""
        values = " ".join(f"{name}={value}" for name, value in config.items())
        command = [BIN / "flwr", "run", app, "here", "--stream", "--run-config", values]
        done = subprocess.run(command, env=self._environment, cwd=self.folder, capture_output=True, text=True)
        (self.folder / "run.log").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, done.stdout + done.stderr


def run_by_flower(app, folder, nodes, **config):
    """Run an app with Flower's own simulation; its files are in `folder`."""
    with ended_after(Stock(folder, nodes)) as it:
        it.start()
        link = folder / "superlink.log"
        until = time.monotonic() + BOUND_S
        while "running on" not in link.read_text().lower():
            assert time.monotonic() < until, link.read_text()
            time.sleep(0.1)
        it.run(app, config)
