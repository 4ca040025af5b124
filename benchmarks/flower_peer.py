"""Flower's SuperLink and SuperNodes as real processes, and one run of an app on them."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.memory_watch import Peaks
from benchmarks.processes import ROOT, NotMeasured, Processes, free_address, toml

PEERS = ROOT / ".venv-peers" / "bin"
NUM_TENSORS = 10
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
PYPROJECT = """\
[project]
name = "exchange"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "atoll"
[tool.flwr.app.components]
serverapp = "{app}:server_app"
clientapp = "{app}:client_app"
[tool.flwr.app.config]
"""


def check_installed() -> None:
    """Check that Flower is installed.

    Raises:
        NotMeasured: it is not.
    """
    if not (PEERS / "flower-superlink").exists():
        raise NotMeasured("Flower is not installed in .venv-peers: make peers")


def app_folder(folder: Path, module: str, values: Mapping[str, object]) -> Path:
    """Make the folder of an app whose code is a module of the benchmarks, and return it."""
    folder.mkdir()
    shutil.copy(ROOT / "benchmarks" / f"{module}.py", folder)
    lines = [f"{name} = {toml(value)}" for name, value in values.items()]
    (folder / "pyproject.toml").write_text(PYPROJECT.format(app=module) + "\n".join([*lines, ""]))
    return folder


@dataclass
class Flower:
    """A SuperLink with several SuperNodes; all their processes inherit the settings."""

    processes: Processes
    num_clients: int
    num_elements: int
    settings: Mapping[str, str] = field(default_factory=dict)
    module: str = "exchange_flower_app"
    """The app, a module of the benchmarks."""
    programs: Path = PEERS
    """The folder of Flower's commands."""
    address: str = field(default_factory=free_address)
    """The address of the SuperLink."""
    asked_at: float = 0.0
    """The time of `flwr run`, once it was called [s since the epoch]."""
    rows: list[dict[str, float]] = field(default_factory=list)
    """The lines that the app has written, one for each round."""

    def run(self, num_rounds: int, limit_s: float) -> tuple[list[float], dict[str, int]]:
        """Run the app; return the seconds of each round, and the peak memory of each kind of process [bytes]."""
        check_installed()
        folder = self.processes.folder
        out = folder / "rounds.jsonl"
        values = {"num-clients": self.num_clients, "num-elements": self.num_elements, "num-rounds": num_rounds}
        app = app_folder(folder / "app", self.module, {**values, "num-tensors": NUM_TENSORS, "out": out})
        self.start_link()
        self.start_nodes(self.address)
        self.submit(app)
        with Peaks({name: process.pid for name, process in self.processes.running.items()}) as peaks:
            self.wait(out, num_rounds, limit_s)
        return [row["seconds"] for row in self.rows], peaks.greatest

    def start_link(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        home = self.processes.folder / "home"
        home.mkdir()
        host, _, port = self.address.rpartition(":")
        (home / "config.toml").write_text(f'[superlink.bench]\naddress = "{self.address}"\ninsecure = true\n')
        link = [str(self.programs / "flower-superlink"), "--insecure", "--host", host, "--port", port]
        self.processes.start("superlink", [*link, "--disable-runtime-dependency-installation"], self._environment)
        self._wait_for_port(int(port))

    def start_nodes(self, address: str) -> None:
        """Start the SuperNodes.

        Args:
            address: the SuperLink's, or that of a proxy in front of it.
        """
        for number in range(self.num_clients):
            port = free_address().rpartition(":")[2]
            node = [str(self.programs / "flower-supernode"), "--insecure", "--superlink", address, "--port", port]
            config = f"partition-id={number} num-partitions={self.num_clients}"
            self.processes.start(f"supernode{number}", [*node, "--node-config", config], self._environment)

    def submit(self, app: Path) -> None:
        """Start a run of the app in a folder."""
        self.asked_at = time.time()
        started = subprocess.run(
            [str(self.programs / "flwr"), "run", str(app), "bench"],
            env={**os.environ, **self._environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if started.returncode:
            raise NotMeasured(f"flwr run: {started.stdout[-1500:]}{started.stderr[-1500:]}")

    @property
    def _environment(self) -> dict[str, str]:
        home, path = self.processes.folder / "home", f"{self.programs}:{os.environ['PATH']}"
        return {**QUIET, **self.settings, "FLWR_HOME": str(home), "PATH": path, "PYTHONPATH": ""}

    def wait(self, out: Path, num_rows: int, limit_s: float) -> None:
        """Wait until the app has written this number of lines into its file, which `rows` then has.

        Raises:
            NotMeasured: it has not, in time.
        """
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            self.rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
            if len(self.rows) >= num_rows:
                return
            time.sleep(0.2)
        raise NotMeasured(
            f"{len(self.rows)} of {num_rows} rounds in {limit_s:g} s: {self.processes.last_words('superlink')}"
        )

    def _wait_for_port(self, port: int) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with Path("/proc/net/tcp").open() as table:
                if any(f":{port:04X} 00000000:0000 0A" in line for line in table):
                    return
            time.sleep(0.1)
        raise NotMeasured(f"the SuperLink does not listen:\n{self.processes.last_words('superlink')}")
