"""The folder of the in-round checkpoint of a crew: of one order, which a later process of the agent may give again."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ORDER = "order"
VOLATILE = {"out", "own_out", "residual", "budget_s", "lease_s"}
"""Fields of a request that do not change what is trained."""


def prepare(folder: Path, request: Mapping[str, Any]) -> None:
    """Make the folder ready for the training of a request: checkpoints of this very one stay, others are deleted."""
    fields = {name: value for name, value in request.items() if name not in VOLATILE}
    identity = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    note = folder / ORDER
    if note.exists() and note.read_text("ascii") == identity:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    note.write_text(identity, "ascii")
