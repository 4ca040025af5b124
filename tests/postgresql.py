"""A real PostgreSQL server for the tests, from the distribution's packages: one for each process that runs tests.

Its files lie in memory where that is possible, so that fsync, without which Atoll refuses a server, costs nothing.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from itertools import count
from pathlib import Path

import psycopg

from benchmarks.processes import free_address
from tests.debian import PACKAGES

ROLE, PASSWORD = "atoll", "s3cret/of:tests"  # what a URL must escape
WANTED = f"missing here: apt-get install {PACKAGES['initdb']}"


def programs() -> Path | None:
    """The folder of `initdb` and `postgres`, of the newest version; None: not installed."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if (on_path := shutil.which("initdb")) is not None:
        found.append(Path(on_path).resolve().parent)
    return max(found, key=lambda path: (path.parent.name.zfill(3), path), default=None)


class Server:
    """Begun by `start`; `crash` and `start` again are what a restart in the middle of everything is."""

    def __init__(self, bin_folder: Path) -> None:
        self._bin = bin_folder
        memory = Path("/dev/shm")
        self._folder = Path(tempfile.mkdtemp(prefix="atoll-pg-", dir=memory if os.access(memory, os.W_OK) else None))
        self._data = self._folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._names = count(1)
        self.port = int(free_address().rpartition(":")[2])
        if os.geteuid() == 0:
            shutil.chown(self._folder, "postgres", "postgres")
        secret = self._folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        how = ("--no-sync", "--encoding=UTF8", "--locale=C", "--auth-local=trust", "--auth-host=scram-sha-256")
        who = (f"--username={ROLE}", f"--pwfile={secret}")
        made = subprocess.run(
            [*self._as_nobody(), self._bin / "initdb", "-D", self._data, *how, *who], capture_output=True, check=False
        )
        assert made.returncode == 0, made.stderr.decode()

    def _as_nobody(self) -> list[str]:
        """The server refuses to run as root; and it ends with whoever has started it."""
        user = ["--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
        return ["setpriv", *user, "--pdeathsig=QUIT"]

    def start(self, **settings: str) -> None:
        """Let it serve, on a socket in its folder and a port of the loopback; returns when it does.

        It ends with the thread that calls this, however that ends: call it from one that stays.
        """
        given = {"max_connections": "40", "shared_buffers": "16MB", "jit": "off", **settings}
        options = [part for name, value in given.items() for part in ("-c", f"{name}={value}")]
        where = ["-k", self._folder, "-c", "listen_addresses=127.0.0.1", "-p", str(self.port)]
        with (self._folder / "log").open("ab") as log:
            command = [*self._as_nobody(), self._bin / "postgres", "-D", self._data, *where, *options]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(600):
            try:
                psycopg.connect(self.url()).close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self._folder / "log").read_text()
                time.sleep(0.05)
        raise AssertionError((self._folder / "log").read_text())

    def crash(self) -> None:
        """End it as a power cut does: nothing is written any more, nobody is told."""
        self._stop(signal.SIGQUIT)

    def stop(self) -> None:
        """End it, and whatever is connected."""
        self._stop(signal.SIGINT)

    def _stop(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None

    def remove(self) -> None:
        """Leave nothing behind."""
        self.crash()
        shutil.rmtree(self._folder)

    def url(self, schema: str = "public", database: str = "postgres") -> str:
        """Over the socket in its folder, which asks for no password."""
        return f"postgresql:///{database}?host={self._folder}&port={self.port}&user={ROLE}&options=-csearch_path%3D{schema}"

    def tcp_url(self, schema: str = "public", password: str = "s3cret%2Fof%3Atests") -> str:
        """Over the loopback, which does."""
        return f"postgresql://{ROLE}:{password}@127.0.0.1:{self.port}/postgres?options=-csearch_path%3D{schema}"

    def new_schema(self) -> str:
        """An empty one, by its name."""
        name = f"test_{next(self._names)}"
        self.sql(f"CREATE SCHEMA {name}")
        return name

    def sql(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Say something to it, and what it answers."""
        with psycopg.connect(self.url(database=database), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []
