"""A stand-in for `atoll simulate`: a real process that writes a run's folder round by round, and resumes it.

fake_simulate.py OUT ROUNDS SPEED FAILS SLEEP_S
"""

import json
import sys
import time
from pathlib import Path

from tests.simulations.experiments.runs import line


def main(out: Path, rounds: int, speed: float, fails: bool, sleep_s: float) -> int:
    log = out / "rounds.jsonl"
    done = len(log.read_text().splitlines()) if log.exists() else 0
    for number in range(done + 1, rounds + 1):
        with log.open("a") as file:
            file.write(json.dumps(line(number, server={"accuracy": min(1.0, speed * number)})) + "\n")
        time.sleep(sleep_s)
    (out / "starts").open("a").write("x")
    if fails:
        sys.stderr.write("Traceback: ...\nit broke\n\n")
        return 3
    (out / "result.json").write_text(json.dumps({"state": "finished"}))
    return 0


if __name__ == "__main__":
    out, rounds, speed, fails, sleep_s = sys.argv[1:]
    raise SystemExit(main(Path(out), int(rounds), float(speed), fails == "True", float(sleep_s)))
