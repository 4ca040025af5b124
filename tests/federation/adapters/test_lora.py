"""The example of adapters, deployed: only LoRA's factors travel, another base is refused, PEFT loads the export."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.tensors import safetensors_file
from tests.federation.processes import ATOLL, federation

EXAMPLE = Path(__file__).parents[3] / "examples" / "adapters"
TASK = str(EXAMPLE / "task.py") + ":task"


def base(folder, steps):
    command = [sys.executable, str(EXAMPLE / "make_base.py"), str(folder), str(steps)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder


def exported(it, *arguments, code=0):
    command = [ATOLL, "model", "export", *map(str, arguments), "--state", str(it.state)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stderr


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_adapters_travel_another_base_is_refused_and_peft_loads_the_export(tmp_path):
    right, wrong = base(tmp_path / "right", 2), base(tmp_path / "wrong", 1)
    settings = {"name": "adapters", "rounds": 2, "round__cohort_size": 3, "round__min_available": 3, "round__quorum": 2}
    # the coordinator's own base is where the task says by default: a copy of the task has it for all
    with federation(tmp_path, task=_task_with(tmp_path, right)) as it:
        it.coordinator(**settings, local__max_steps=2)
        for site in ("north", "south", "mesh"):
            special = {"south": {"task.base": str(wrong)}, "mesh": {"crew.mesh": "dp_shard=2"}}.get(site, {})
            it.agent(site, threads=1, exit_when_done=site != "south", **special)
        assert it.wait_for_end() == 0, it.log("coordinator")
        refused, by_ranks = it.log("south"), it.log("mesh")
        fates = [record.clients["mesh"].fate for record in it.history().rounds("adapters-1")]
        digest = it.history().run("adapters-1").config.model.frozen
        sizes = {path.name: path.stat().st_size for path in it.state.glob("**/versions/*.safetensors")}
        exported(it, "--peft", tmp_path / "peft")
        exported(it, "--out", tmp_path / "whole.safetensors", "--whole")
        exported(it, "--out", tmp_path / "adapter.safetensors")
        assert "allowed: --out FILE" in exported(it, "--whole", code=2)
    assert fates == ["reported", "reported"]
    assert "2 ranks are here, rank 0 on" in by_ranks
    assert "their digest is " in refused
    assert f"and {digest} in the run" in refused
    assert max(sizes.values()) < 40_000 < 500_000 < (tmp_path / "whole.safetensors").stat().st_size
    _compare(tmp_path, right)


def _task_with(folder, place):
    """Return the example's task with another place of the base."""
    for file in EXAMPLE.glob("*.py"):
        text = file.read_text().replace("/tmp/tiny-llama", str(place))
        (folder / file.name).write_text(text)
    return f"{folder / 'task.py'}:task"


def _compare(folder, place):
    """PEFT's model on the base, and the task's own with the whole file, compute the same to the bit."""
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    from atoll import load_task

    tokens = torch.arange(60).reshape(2, 30)
    ours = load_task(f"{folder / 'task.py'}:task").model()
    ours.load_state_dict(load_file(folder / "whole.safetensors"))
    loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(place), folder / "peft")
    with torch.no_grad():
        assert torch.equal(ours.eval()(tokens).logits, loaded.eval()(tokens).logits)
    adapter = safetensors_file.read(folder / "adapter.safetensors")
    assert {name.rpartition(".lora_")[2] for name in adapter} == {"A.default.weight", "B.default.weight"}
    assert any(array.any() for name, array in adapter.items() if ".lora_B." in name)
    assert json.loads((folder / "peft" / "adapter_config.json").read_text())["r"] == 4
