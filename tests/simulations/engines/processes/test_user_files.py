import importlib
import sys
from pathlib import Path

import pytest

from atoll.plugins.reference import folder_of_notes, load_module
from atoll.simulations.engines.processes.user_files import let_import, sources

FILES = {
    "task.py": "import near_the_task\nfrom box_of_mine.inside import WIDTH\n\ntask = near_the_task.late\n",
    "near_the_task.py": "def late():\n    import asked_for_late\n    return asked_for_late.__file__\n",
    "asked_for_late.py": "",
    "box_of_mine/__init__.py": "",
    "box_of_mine/inside.py": "from box_of_mine import deeper\n\nWIDTH = deeper.WIDTH\n",
    "box_of_mine/deeper.py": "WIDTH = 3\n",
    "bare_folder/module.py": "HERE = True\n",
    "another_task.py": "raise RuntimeError('nobody needs this')\n",
    "private.csv": "1,2,3\n",
}
MINE = ("near_the_task", "asked_for_late", "box_of_mine", "bare_folder", "another_task", "_atoll_user_task")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, whose imported modules are removed afterwards."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    forget()


def forget():
    for name in [name for name in sys.modules if name.startswith(MINE)]:
        del sys.modules[name]
    importlib.invalidate_caches()


def test_only_modules_that_the_task_imported_can_be_imported_elsewhere(folder, monkeypatch):
    module = load_module(f"{folder}/task.py:task")
    module.task()
    importlib.import_module("bare_folder.module")
    found = sources()
    ours = {name for name, source in found.items() if Path(source.path).is_relative_to(folder)}
    modules = {"box_of_mine", "box_of_mine.inside", "box_of_mine.deeper", "bare_folder.module"}
    assert ours == {module.__name__, "near_the_task", "asked_for_late", *modules}
    assert not any(name.startswith(("atoll", "torch", "numpy", "pytest")) for name in found)

    forget()
    sys.path[:] = [place for place in sys.path if place not in (str(folder), str(folder_of_notes()))]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("near_the_task")
    let_import({name: found[name] for name in ours})
    assert importlib.import_module("near_the_task").late() == str(folder / "asked_for_late.py")
    assert importlib.import_module("box_of_mine.inside").WIDTH == 3
    assert importlib.import_module("bare_folder.module").HERE
    importlib.import_module(module.__name__).task()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("another_task")
