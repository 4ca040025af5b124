"""An agent with a mesh refuses a task that no mesh can train before it dials, not in a round."""

import subprocess
import sys
from pathlib import Path

TASK = str(Path(__file__).with_name("kept_task.py")) + ":task"


def test_what_a_mesh_cannot_train_ends_the_agent_with_2(tmp_path):
    options = ["--site", "a", "--mesh", "dp=2", "--insecure", "--state", str(tmp_path / "state")]
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "atoll", "agent", TASK, *options]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "task.algorithm: Doubled.loss needs whole batches" in ended.stderr
    assert "local.keep: 'w' keeps the whole model" in ended.stderr
    assert "connected" not in ended.stderr
