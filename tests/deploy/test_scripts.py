"""The batch scripts of deploy/slurm: what Slurm and Atoll parse in them, without a Slurm."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from atoll.client.config import AgentConfig
from atoll.protocol.settings import load_text
from tests.deploy.test_manifests import COMMANDS

SCRIPTS = sorted((Path(__file__).parents[2] / "deploy/slurm").glob("*.sh"))
GIVEN = {"site": {"ATOLL_JOIN": "code"}, "coordinator": {}, "sweep": {"SLURM_ARRAY_TASK_ID": "3"}}


def executed(script, *arguments, **environment):
    """Return the arguments with which a script starts `atoll`, by a stand-in that prints them."""
    folder = Path(environment.pop("folder"))
    stand_in = folder / "atoll"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    (folder / "code").write_text("atoll-code")
    environment |= {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", str(script), *arguments], env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.real
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_parser_of_its_command_takes_what_a_script_gives(script, tmp_path, monkeypatch):
    positional = {"coordinator": ["run.toml"], "sweep": ["grid.toml"]}.get(script.stem, [])
    name, *rest = executed(script, *positional, folder=tmp_path, **GIVEN[script.stem])
    monkeypatch.chdir(tmp_path)
    context = COMMANDS[name].make_context(name, rest)
    if script.stem == "site":
        assert context.params["join"] == "@code"
        assert "--join" not in executed(script, folder=tmp_path), "a code is for the first start"
    if script.stem == "sweep":
        assert (context.params["out"], context.params["overrides"]) == ("sweep-3", ("seed=3",))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_job_begins_again_and_is_told_of_its_end(script):
    text = script.read_text()
    options = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert {"--requeue", "--open-mode=append", "--signal=B:TERM@60"} <= options
    assert re.search(r"^exec atoll ", text, re.MULTILINE), "a shell between would keep the signal"
    assert shlex.split(text, comments=True)


def test_the_agent_of_a_site_of_several_nodes_starts_its_ranks_as_the_page_says():
    text = SCRIPTS[0].with_name("agent.toml").read_text()
    crew = load_text(AgentConfig, text, [], name="agent.toml").crew
    page = (Path(__file__).parents[2] / "docs/large-clients.md").read_text()
    shown = [block for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "srun" in block]
    assert [tomllib.loads(block)["crew"]["command"] for block in shown] == [tomllib.loads(text)["crew"]["command"]]
    assert crew.nodes == 2
