"""The settings of a crew: what cannot be is refused before anything runs; and the command that starts the ranks."""

import json
import sys
from pathlib import Path

import pytest

from atoll.client.config import AgentConfig
from atoll.client.crew_config import CrewConfig
from atoll.client.disk.state_directory import StateDirectory
from atoll.client.work.crew import command_of, crews_of, terms_of
from atoll.protocol.settings import ConfigError, effective, load, load_text

FOLDER = "crew.folder=shared"


def settings(*overrides):
    return load(AgentConfig, None, ["site=a", *overrides]).crew


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["crew.mesh=dp_shard=4,tp=2", "crew.nproc=4"], "has 8 ranks, and nproc 4 start 4: make them equal"),
        (["crew.mesh=dp=4", "crew.nproc=4", "crew.nodes=2", "crew.launch=external", FOLDER], "4 on 2 nodes start 8"),
        (["crew.mesh=dp=3", "crew.nodes=2", "crew.launch=external", FOLDER], "which 2 nodes cannot share evenly"),
        (["crew.mesh=dp=4", "crew.nodes=2"], 'nodes 2 with launch = "local"'),
        (["crew.mesh=dp=2", "crew.launch=command", FOLDER], 'launch = "command" without command'),
        (["crew.mesh=dp=2", 'crew.command=["srun"]'], 'command with launch = "local"'),
        (["crew.mesh=dp=2", "crew.launch=external"], 'launch = "external" without folder'),
        (
            ["crew.mesh=dp=2", "crew.launch=command", FOLDER, 'crew.command=["srun", "{hosts}"]'],
            "command: 'hosts' in braces (allowed: nproc, nodes, num_ranks, folder, rendezvous, python",
        ),
        (["crew.mesh=dp=0"], "'dp=0' must be AXIS=DEGREE"),
        (["crew.mesh=dp=2", 'crew.plan.precision="fp8"'], "plan.precision: must be one of fp32, bf16"),
        (["crew.mesh=auto"], 'mesh = "auto" without nproc: give the number of ranks on each machine'),
        (["crew.mesh=auto", "crew.nproc=2", "crew.plan.zero=9"], "plan.zero: must be 0, 1, 2, 3 or none, got 9"),
        (
            ["crew.mesh=dp=2", "crew.checkpoint_every=50"],
            'got 50, which has no unit: write "50 s" for seconds, or "50 steps"',
        ),
        (
            ["crew.mesh=dp=2", 'crew.checkpoint_every="5 days"'],
            "got '5 days'; allowed: a number with a unit, \"300 s\"",
        ),
        (["crew.mesh=dp=2", "crew.checkpoint_every=true"], "got True; allowed: a number with a unit"),
        (["crew.nproc=2"], "nproc: settings of a crew without its mesh"),
    ],
)
def test_what_cannot_be_is_refused_with_one_sentence(overrides, fault):
    with pytest.raises(ConfigError) as caught:
        settings(*overrides)
    assert fault in "\n".join(caught.value.faults)


def test_all_faults_come_at_once():
    with pytest.raises(ConfigError) as caught:
        settings("crew.mesh=dp=4", "crew.nproc=3", "crew.nodes=2", "crew.plan.zero=7", 'crew.command=["x"]')
    text = "\n".join(caught.value.faults)
    assert "nodes 2" in text
    assert "command with" in text
    assert "plan.zero" in text


def test_dp_means_copies_unless_there_is_zero():
    assert str(settings("crew.mesh=dp=2").parallel.mesh) == "dp_replicate=2"
    assert str(settings("crew.mesh=dp=2", "crew.plan.zero=3").parallel.mesh) == "dp_shard=2"
    assert settings("crew.mesh=dp=2,tp=4").num_here == 8


def test_auto_leaves_the_mesh_to_the_ranks(tmp_path):
    config = settings(
        *("crew.mesh=auto", "crew.nproc=2", "crew.nodes=4", "crew.launch=external", FOLDER), "crew.plan.zero=2"
    )
    assert (config.num_ranks, config.num_here) == (8, 2)
    terms = terms_of(config, tmp_path, tmp_path / "worker.x.log", "cpu", 60.0)
    assert (terms.plan, terms.num_ranks) == ({"mesh": "auto", "zero": 2}, 8)


@pytest.mark.parametrize(
    ("text", "seconds", "steps"),
    [
        *(("300 s", 300.0, 0), ("5min", 300.0, 0), ("1.5 h", 5400.0, 0), ("1 step", 0.0, 1), ("50 steps", 0.0, 50)),
        *(("0", 0.0, 0), ("0 s", 0.0, 0)),
    ],
)
def test_an_interval_has_a_unit(text, seconds, steps, tmp_path):
    config = settings("crew.mesh=dp=2", f'crew.checkpoint_every="{text}"')
    every = terms_of(config, tmp_path, tmp_path / "worker.x.log", "cpu", 60.0).checkpoint_every
    assert (every.seconds, every.steps, every.is_never) == (seconds, steps, text.startswith("0"))
    assert settings("crew.mesh=dp=2", "crew.checkpoint_every=0").checkpoint_every == "0"


def test_a_template_is_filled_with_what_the_ranks_need(tmp_path):
    argv = [*("srun", "--nodes={nodes}", "torchrun", "--nproc-per-node={nproc}"), "--rdzv-endpoint={rendezvous}"]
    argv += ["-m", "atoll.parallel.mesh_client", "{folder}", "{{literal}}"]
    config = settings(
        *("crew.mesh=dp=4", "crew.nodes=2", "crew.launch=command", f"crew.folder={tmp_path}"),
        f"crew.command={json.dumps(argv)}",
    )
    terms = terms_of(config, tmp_path, tmp_path / "worker.x.log", "cpu", 60.0)
    command, environment = command_of(config, terms)
    assert command[:4] == ["srun", "--nodes=2", "torchrun", "--nproc-per-node=2"]
    assert int(command[4].rpartition(":")[2]) > 1023
    assert command[5:] == ["-m", "atoll.parallel.mesh_client", str(tmp_path), "{literal}"]
    assert environment == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert terms.listen == ":0"
    assert terms.ranks.log == str(tmp_path / "worker.x"), "where all machines can write"


def test_local_ranks_are_those_of_torch_elastic_on_this_machine(tmp_path):
    config = settings("crew.mesh=dp=2")
    terms = terms_of(config, tmp_path, tmp_path / "worker.x.log", "cpu", 60.0)
    command, environment = command_of(config, terms)
    assert command[0] == sys.executable
    assert json.loads(command[-1])["nproc"] == 2
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in environment
    assert (terms.listen, terms.num_ranks) == ("", 2)


def test_there_is_a_crew_for_each_task(tmp_path):
    state = StateDirectory(tmp_path / "state")
    try:
        tasks = {"one": "one.py:task", "two": "two.py:task"}
        found = crews_of(tasks, settings("crew.mesh=dp=2"), site="a", state=state, device="cpu", load_timeout=9.0)
        assert list(found) == ["one", "two"]
        assert [crew.pid for crew in found.values()] == [None, None]
    finally:
        state.close()


def test_an_agent_without_a_mesh_has_no_crew():
    assert CrewConfig().mesh == ""
    assert load(AgentConfig, None, ["site=a"]).crew == CrewConfig()
    assert Path(settings("crew.mesh=dp=2", FOLDER).folder) == Path("shared")


def test_the_settings_as_check_prints_them_are_settings():
    for overrides in ([], ["crew.mesh=dp=2"], ["crew.mesh=auto", "crew.nproc=2"]):
        before = load(AgentConfig, None, ["site=a", *overrides])
        assert load_text(AgentConfig, effective(before), name="x") == before
