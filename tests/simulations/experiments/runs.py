"""Run folders in the form of `atoll simulate`, made by hand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def line(number: int, **changes: Any) -> dict[str, Any]:
    """Return the line of one round: 13 invited, ten reported, two stragglers, one lost; bytes since the run began."""
    return {
        "round": number,
        "version": number,
        "state": "committed",
        "why": "cohort complete",
        "virtual_s": 100.0 * number,
        "round_s": 100.0,
        "real_s": 2.0 * number,
        "invited": 13,
        "reported": 10,
        "late": 1,
        "counted": 11,
        "lost": 1,
        "failed": 0,
        "stragglers": 2,
        "refused": 0,
        "released": 0,
        "fates": {},
        "bytes_down": 1300 * number,
        "bytes_up": 400 * number,
        "bytes_up_plain": 1000 * number,
        "train": {"loss": 2.0 / number},
        "server": {"loss": 1.0 / number, "accuracy": number / (number + 1)},
        "clients": None,
        "client_values": None,
        **changes,
    }


def write_run(folder: Path, lines: list[dict[str, Any]], *, state: str | None = "finished", **tables: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    if state is not None:
        result: Mapping[str, Any] = {"state": state, "rounds": len(lines), "real_s": lines[-1]["real_s"]}
        (folder / "result.json").write_text(json.dumps(result))
    (folder / "run.toml").write_text('task = "digits.py:task"\n[round]\ndeadline = 30.0\n')
    return folder
