"""Exports in processes of their own, which are killed at any moment and started again: nothing twice, nothing lost."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.federation import ATOLL, federation, start_run, wait_for
from tests.cli.invoking import shown
from tests.exports.readers import expected, points
from tests.simulations.experiments.runs import line, write_run
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("tool", ["tensorboard", "mlflow", "wandb", "jsonl"])
def test_an_export_that_is_killed_again_and_again_ends_with_each_number_once(tool: str, tmp_path: Path) -> None:
    num_rounds, num_killed = (150, 1) if tool == "mlflow" else (600, 2)  # a start of MLflow takes seconds
    run = write_run(tmp_path / "run", [line(k) for k in range(1, num_rounds + 1)])
    place, rng, codes = tmp_path / "to", random.Random(tool), list[int]()
    arguments = ("export", tool, str(run), "--to", str(place))
    for _ in range(num_killed):
        command = [sys.executable, "-m", "tests.cli.exports.killed_export", str(rng.uniform(0.02, 0.2)), *arguments]
        codes.append(subprocess.run(command, stdout=subprocess.DEVNULL, timeout=BOUND_S, cwd=ROOT).returncode)
    assert codes == [-signal.SIGKILL] * num_killed
    (found,) = shown(*arguments)
    assert 0 < found["rows"] <= num_rounds
    wanted, numbers = expected(run), points(tool, place, "run")
    assert {key: len(values) for key, values in numbers.items()} == dict.fromkeys(wanted, 1)
    for key, (value,) in numbers.items():
        assert value == pytest.approx(wanted[key][0], rel=1e-6)


def test_a_deployed_run_is_followed_by_another_process_which_is_killed_meanwhile(tmp_path: Path) -> None:
    with federation(tmp_path) as it:
        start_run(it, "digits", "rounds=12", "round.cohort_size=2", "pause=0.1")
        place = tmp_path / "to"

        def follower() -> subprocess.Popen[bytes]:
            command = [str(ATOLL), "export", "tensorboard", "digits-1", "--state", str(it.state), "--to", str(place)]
            return subprocess.Popen([*command, "--follow"], cwd=tmp_path)

        process = follower()
        it.processes["follower"] = process
        file = place / "digits-1" / "events.out.tfevents.atoll"
        wait_for(lambda: file.exists() and ("round/invited", 2) in points("tensorboard", place, "digits-1"))
        process.kill()
        process.wait()
        it.processes["follower"] = process = follower()
        assert process.wait(BOUND_S) == 0
        rounds = shown("round", "list", "--run", "digits-1", "--state", it.state)
        found = points("tensorboard", place, "digits-1")
        assert it.run_state("digits-1") == "finished"
        assert [found["round/counted", row["round"]] for row in rounds] == [[row["counted"]] for row in rounds]
        measured = shown("run", "show", "digits-1", "--state", it.state)["metrics"]
        numbers = {(f"{who}/{name}", int(v)) for v, of in measured.items() for who, m in of.items() for name in m}
        assert {key for key in found if key[0].startswith(("server/", "clients/"))} == numbers
        assert all(len(values) == 1 for values in found.values())


class Server(BaseHTTPRequestHandler):
    """As much of a server of W&B's as `wandb sync` asks for; it keeps the lines of the history."""

    history: list[dict[str, Any]]
    is_complete: bool

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        answer: dict[str, Any] = {}
        if "upsertBucket" in (query := body.get("query", "")):
            project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "x", "name": body["variables"]["name"], "config": "{}", "project": project}
            answer = {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        elif "createRunFiles" in query:
            answer = {"data": {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []}}}
        elif query:
            answer = {"data": {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}"}}}
        else:
            for text in body.get("files", {}).get("wandb-history.jsonl", {}).get("content", ()):
                self.history.append(json.loads(text))
            type(self).is_complete |= body.get("complete", False)
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def server() -> Iterator[str]:
    Server.history, Server.is_complete = [], False
    it = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=it.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{it.server_port}"
    finally:
        it.shutdown()
        it.server_close()
        thread.join()


def test_the_own_reader_of_wandb_finds_each_number_in_an_offline_run(tmp_path: Path) -> None:
    """`wandb sync` reads the file, a long one whose records lie over the ends of blocks, and uploads what it found."""
    run = write_run(tmp_path / "run", [line(k) for k in range(1, 201)])
    shown("export", "wandb", run)
    (offline,) = (run / "wandb").glob("offline-run-*")
    with server() as address:
        environment = os.environ | {"WANDB_BASE_URL": address, "WANDB_API_KEY": "a" * 40, "HOME": str(tmp_path)}
        command = [str(ATOLL.with_name("wandb")), "sync", "--yes", str(offline)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Server.is_complete
    found = {(name, row["round"]): [value] for row in Server.history for name, value in row.items() if "/" in name}
    assert len(Server.history) == 200
    assert found == expected(run)
