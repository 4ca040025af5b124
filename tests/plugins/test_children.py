import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from atoll.plugins.reference import folder_of_notes, load_module

FILE = """
from pathlib import Path
import neighbour

class Rows:
    def __call__(self, number):
        return number * neighbour.FACTOR, Path(__file__).name
"""

LOADER = """
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from atoll.plugins.reference import load_module
if __name__ == "__main__":
    rows = load_module(sys.argv[1]).Rows()
    with ProcessPoolExecutor(2, get_context(sys.argv[2])) as pool:
        print(list(pool.map(rows, [1, 2])))
"""


JOBLIB = """
import sys
from joblib import Parallel, delayed
from atoll.plugins.reference import load_module
if __name__ == "__main__":
    rows = load_module(sys.argv[1]).Rows()
    print(Parallel(2, backend=sys.argv[2])(delayed(rows)(number) for number in (1, 2)))
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("FACTOR = 7\n")
    (tmp_path / "odd.py").write_text(FILE)
    return tmp_path / "odd.py"


WAYS = [
    *((LOADER, method) for method in ("spawn", "forkserver", "fork")),
    *((JOBLIB, method) for method in ("loky", "multiprocessing")),
]


@pytest.mark.real
@pytest.mark.parametrize(("program", "method"), WAYS)
def test_a_child_started_in_any_way_finds_the_classes_of_a_tasks_file(
    task_file: Path, program: str, method: str
) -> None:
    script = task_file.parent / "script.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, script, f"{task_file}:task", method], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.strip() == "[(7, 'odd.py'), (14, 'odd.py')]"


def test_the_note_is_in_a_folder_that_its_user_alone_can_write(
    task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = load_module(f"{task_file}:task")
    folder = folder_of_notes()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / f"{module.__name__}.py").exists()
    assert str(folder) in sys.path
    folder.chmod(0o777)
    assert folder_of_notes() != folder, "a folder that others can write is not used"


def test_a_task_loads_where_no_note_can_be_written(task_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(task_file / "nowhere"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_module(f"{task_file}:task").Rows()(3) == (21, "odd.py")
