import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def _database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of MLflow's: it takes seconds to make."""
    from atoll.exports.mlflow import DATABASE, Mlflow

    folder = tmp_path_factory.mktemp("mlflow")
    Mlflow(str(folder)).check()
    return folder / DATABASE


@pytest.fixture
def place_of(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Return the function from a tool to a new place of an export."""

    def place(tool: str) -> Path:
        found = tmp_path / "to" / tool
        found.mkdir(parents=True)
        if tool == "mlflow":
            shutil.copy(request.getfixturevalue("_database"), found)
        return found

    return place
