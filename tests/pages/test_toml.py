"""Every TOML block of every page is a file that what reads it takes: no unknown key, no value that is not allowed."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from atoll.client.config import AgentConfig
from atoll.client.policy.config import SitePolicy
from atoll.operations.faults import CommandError
from atoll.operations.plan import parse_arguments
from atoll.protocol.settings import ConfigError, load_text
from atoll.server.config.model import ModelConfig
from atoll.server.config.process import HostFile
from atoll.server.config.run import RunFile
from atoll.simulations.experiments.grid import parse_grid
from atoll.simulations.experiments.sweep import overrides
from atoll.simulations.federation.config import SimulationFile
from atoll.task.local import Local
from tests.pages.blocks import PAGES, Block, blocks_of

LANGUAGE = "toml"
BLOCKS = [block for page in PAGES for block in blocks_of(page) if block.language == LANGUAGE and not block.reason]
OF_A_SIMULATION = SimulationFile.model_fields.keys() - RunFile.model_fields.keys()


def read(text: str, folder: Path) -> Any:
    """Read a file of settings as its tables say: a policy, a plan, a sweep, a simulated run, a coordinator, or a run.

    Raises:
        ConfigError: what is not allowed in it.
        CommandError: the same of a plan.
    """
    document = tomllib.loads(text)
    tables = document.keys()
    if "site" in tables:
        return load_text(AgentConfig, text, name="page")
    if "crew" in tables:  # of an agent's file, without its site
        return load_text(AgentConfig, f"site = 'hospital'\n{text}", name="page")
    if "tasks" in tables:
        return load_text(SitePolicy, text, name="page")
    if "model" in tables and not document["model"].keys() & ModelConfig.model_fields.keys():
        (folder / "plan.toml").write_text(text)
        return parse_arguments(str(folder / "plan.toml"), None, {})
    whole = text if "task" in tables else f"task = 'digits.py:task'\n{text}"
    if "grid" in tables:
        cells = parse_grid(whole.encode(), Path("page.toml")).cells
        task = f"task = {cells[0].task!r}"
        return [load_text(SimulationFile, task, overrides(cell), name="page") for cell in cells]
    if tables == {"coordinator"}:
        return load_text(HostFile, text, name="page")
    file = load_text(SimulationFile if tables & OF_A_SIMULATION else RunFile, whole, name="page")
    return file, Local().with_overrides(file.run.local)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_the_settings_of_a_page_are_allowed(block: Block, tmp_path: Path) -> None:
    assert read(block.text, tmp_path)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_key_that_is_not_there_is_noticed_in_each_of_its_tables(block: Block, tmp_path: Path) -> None:
    lines = block.text.splitlines()
    free = ("[[grid", "[task]", "[sites.")  # a group of the grid has columns of any name, each task its own values
    tables = [
        0,
        *(number + 1 for number, line in enumerate(lines) if line.startswith("[") and not line.startswith(free)),
    ]
    for place in tables:
        text = "\n".join([*lines[:place], "moonphase = 1", *lines[place:]])
        with pytest.raises((ConfigError, CommandError, ValueError), match="moonphase"):
            read(text, tmp_path)
