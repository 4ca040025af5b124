"""`atoll new`: write a first project, whose test passes and whose run ends with a committed model."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import options
from atoll.cli.printing import as_json, say
from atoll.operations.faults import CommandError

FILES = ("README.md", "agent.toml", "digits.csv.gz", "policy.toml", "run.toml", "task.py", "test_task.py")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write; it is created if it is missing.")]


def new(folder: Folder, json: options.Json = False) -> None:
    """Write a first project: a task, its data, the settings of a run and of an agent, a site's policy, and a test."""
    if present := [folder / name for name in FILES if (folder / name).exists()]:
        raise CommandError(*(f"{path} exists, and is not overwritten: name another folder" for path in present))
    folder.mkdir(parents=True, exist_ok=True)
    templates = files("atoll.cli") / "project"
    for name in FILES:
        (folder / name).write_bytes((templates / name).read_bytes())
        if not json:
            say(f"wrote {folder / name}")
    if json:
        as_json({"folder": folder, "files": FILES})
        return
    say(f"\nnext: cd {folder}, and read README.md")
