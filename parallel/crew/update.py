"""The update of a mesh: a folder of parts, one of each rank that owns boxes of the model."""

from contextlib import nullcontext
from pathlib import Path
from shutil import rmtree
from typing import Any

from atoll.aggregation.tensors.layout import CONTROL
from atoll.aggregation.tensors.pieces import part_name
from atoll.aggregation.tensors.shared_file import make_shared
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.crew.building import MeshModel
from atoll.parallel.crew.control import ControlBoxes, variates_of
from atoll.parallel.crew.together import together
from atoll.parallel.exchange.write import Encoding, write_part
from atoll.parallel.worker.bench import Json
from atoll.parallel.worker.operations import piece_fields

Part = list[tuple[Any, ...]]
"""The pieces of a part, as the worker protocol has them (`operations.piece_fields`)."""


def write_update(model: MeshModel, request: Json, ranks: Ranks, steps_by_lr: float | None) -> list[Part]:
    """Write this rank's part of the update, and of the client's new control variates; every rank calls it.

    Args:
        model: after the training.
        request: `train` (`worker/main`).
        ranks: of the mesh.
        steps_by_lr: SCAFFOLD's K η; None: it is another algorithm.

    Returns:
        The pieces of every part, in the order of the parts.

    Raises:
        NotFinite, TaskMismatch, OSError: on all ranks; the parts are then worth nothing.
    """
    out, version, mine = Path(request["out"]), Path(request["model"]), together(ranks, model.owned)
    owners = [rank for rank, count in enumerate(ranks.gather(len(mine))) if count]

    def make() -> None:
        if ranks.is_first:
            _make_empty(out)
            if steps_by_lr is not None:
                make_shared(Path(request["own_out"]), variates_of(version))

    def write() -> Part:
        if not mine:
            return []
        part = owners.index(ranks.rank)
        encoding = Encoding(request.get("codec") or "", request["seed"], part, model.buffers)
        with _control_boxes(model, request, steps_by_lr) as beside:
            return piece_fields(write_part(mine, version, out / part_name(part), encoding, beside))

    together(ranks, make)
    return [pieces for pieces in ranks.gather(together(ranks, write)) if pieces]


def _control_boxes(model: MeshModel, request: Json, steps_by_lr: float | None) -> Any:
    if steps_by_lr is None:
        return nullcontext(())
    version, own = Path(request["model"]), Path(request["own"]) if request.get("own") else None
    names = {tensor.name.removeprefix(CONTROL) for tensor in variates_of(version)}
    trained = [share for share in model.owned() if share.name in names]
    return ControlBoxes(trained, version, own, Path(request["own_out"]), steps_by_lr)


def _make_empty(folder: Path) -> None:
    """Make a folder for the parts, without those of an earlier attempt."""
    if folder.is_dir():
        rmtree(folder)
    folder.mkdir(parents=True)
