"""The files of a mesh's training: the update as a folder of parts, and the state that stays at the client."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import torch

from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.exchange.feedback import BoxFeedback, make_residual
from atoll.parallel.exchange.shares import Share
from atoll.parallel.exchange.write import BLOCK_ELEMENTS, Box, Encoding, write_part
from atoll.parallel.hooks import MeshClient
from atoll.parallel.mesh_client.building import MeshModel
from atoll.parallel.mesh_client.control import ControlBoxes
from atoll.parallel.mesh_client.crash_points import reached
from atoll.parallel.mesh_client.hook_files import own_boxes, shared_boxes
from atoll.parallel.mesh_client.kept_optimizer import store_state
from atoll.parallel.mesh_client.together import together
from atoll.task.errors import NotFinite
from atoll.task.local import Local
from atoll.tensors.codecs.names import open_codec, parse_codec
from atoll.tensors.layout import CONTROL, SHARED, STATE, Tensor
from atoll.tensors.pieces import part_name
from atoll.tensors.safetensors_file import NUMPY_DTYPES, parse_header
from atoll.tensors.shared_file import BoxWriter, make_shared
from atoll.training.local.client import form_of_state
from atoll.training.local.kept_optimizer import layout_of_optimizer
from atoll.training.worker.bench import Json
from atoll.training.worker.operations import piece_fields

logger = logging.getLogger(__name__)

Part = list[tuple[Any, ...]]
"""The pieces of a part, as the worker protocol has them (`operations.piece_fields`)."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files that one training writes: the parts of the update, and the client's state.

    The model is in its state after the training. Every rank calls the methods at the same point.
    """

    model: MeshModel
    local: Local
    """The settings of the round."""
    algorithm: str
    request: Json
    """The request to train, as of `worker/main`."""
    ranks: Ranks
    client: MeshClient | None = None
    """The client of the task's algorithm."""

    @property
    def version(self) -> Path:
        """The file of the version from which the training starts."""
        return Path(self.request["model"])

    @property
    def own(self) -> Path | None:
        """The file of the client's state before the training; None: there is none yet."""
        return Path(self.request["own"]) if self.request.get("own") else None

    @property
    def own_out(self) -> Path:
        """The file of the client's state after the training."""
        return Path(self.request["own_out"])

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """The tensors of the client's state; empty: it has none."""
        outline, stays = self.model.outline, self.model.stays
        kept = [Tensor(name, dtype, shape) for name, (shape, dtype) in outline.forms.items() if name in stays]
        if self.algorithm == "scaffold":
            kept += [Tensor(CONTROL + name, "F32", shape) for name, shape in outline.trained if name not in stays]
        if self.local.keep_optimizer:
            kept += layout_of_optimizer(self.local, outline.trained)
        if self.client is not None:
            kept += form_of_state(self.client.state)
        return tuple(kept)

    def write(self) -> list[Part]:
        """Write this rank's part of the update, and its boxes of the client's state.

        Returns:
            The pieces of each rank's part, in the order of the ranks; empty: it has none.

        Raises:
            NotFinite, TaskMismatch, OSError: on all ranks; the files are then worth nothing.
        """
        out, mine = Path(self.request["out"]), together(self.ranks, self._owned)
        state, shared = self._state(), self._shared()
        owners = [rank for rank, count in enumerate(self.ranks.gather(len(mine) + len(shared))) if count]

        def make() -> None:
            if self.ranks.is_first:
                _make_empty(out)
                if self.kept:
                    make_shared(self.own_out, self.kept)
                if self._has_feedback:
                    make_residual(Path(self.request["residual"]), self._encoded, self._owed)

        def write() -> Part:
            store_layers([*self.model.owned_here(), *state], self.own_out)
            if self.local.keep_optimizer:
                names = {share.name for share in (*mine, *self.model.owned_here())}
                shards = [shard for shard in self.model.shards() if shard.share.name in names]
                store_state([shard for shard in shards if not shard.share.is_further], self.local, self.own_out)
            if not mine and not shared:
                return []
            part = owners.index(self.ranks.rank)
            encoding = Encoding(self._codec, self.request["seed"], part, self.model.outline.buffers)
            with self._beside(shared) as beside, self._feedback(mine) as feedback:
                encoding = replace(encoding, feedback=feedback)
                pieces = write_part(mine, self.version, out / part_name(part), encoding, beside)
            reached("crew.part_written")
            return piece_fields(pieces)

        together(self.ranks, make)
        return self.ranks.gather(together(self.ranks, write))

    @property
    def _codec(self) -> str:
        """The name of the codec; empty: none, or none that this process has, as plain values are always taken."""
        name: str = self.request.get("codec") or ""
        try:
            return open_codec(name).name if name else ""
        except ValueError as fault:
            logger.warning("the update is sent without a codec: %s", fault)
            return ""

    @property
    def _has_feedback(self) -> bool:
        return bool(self.request.get("residual") and self._codec and parse_codec(self._codec).is_biased)

    @property
    def _owed(self) -> list[Path]:
        return [Path(path) for path in self.request.get("owed", ())]

    @property
    def _encoded(self) -> list[Tensor]:
        """The tensors that the codec encodes."""
        plain = {*self.model.outline.buffers}
        layout, names = parse_header(self.version)[0], {*self.model.outline.names}
        return [t for t in layout if t.name in names and t.dtype == "F32" and t.name not in plain]

    def _feedback(self, mine: Sequence[Share]) -> AbstractContextManager[BoxFeedback | None]:
        """Open the residuals of this rank's boxes; None: the codec is not biased."""
        if not self._has_feedback:
            return nullcontext(None)
        encoded = {tensor.name for tensor in self._encoded}
        boxes = [share.piece for share in mine if share.name in encoded]
        return BoxFeedback(self._owed, Path(self.request["residual"]), boxes)

    def _owned(self) -> list[Share]:
        """Return the boxes of the model that this rank sends."""
        left = self.client.leaves_out if self.client is not None else ()
        return [share for share in self.model.owned() if share.name not in left]

    def _state(self) -> list[Share]:
        """Return the boxes of the state of the task's algorithm that this rank stores."""
        return [] if self.client is None else own_boxes(STATE, self.client.to_keep(), self.model.engine.axes)

    def _shared(self) -> list[Share]:
        """Return the boxes of the algorithm's shared tensors that this rank sends."""
        return [] if self.client is None else own_boxes(SHARED, self.client.to_send(), self.model.engine.axes)

    def _beside(self, shared: list[Share]) -> AbstractContextManager[list[Box]]:
        """Open the boxes of the update that are beside the model's: control variates or shared tensors."""
        if shared:
            return shared_boxes(shared, self.version)
        if self.algorithm != "scaffold":
            return nullcontext([])
        trained = {name for name, _ in self.model.outline.trained}
        owned = [share for share in self.model.owned() if share.name in trained]
        steps_by_lr = self.model.engine.steps * self.local.lr
        return ControlBoxes(owned, self.version, self.own, self.own_out, steps_by_lr)


def _make_empty(folder: Path) -> None:
    """Make a folder for the parts, and delete the parts of an earlier attempt."""
    if folder.is_dir():
        rmtree(folder)
    folder.mkdir(parents=True)


def store_layers(shares: Sequence[Share], own_out: Path) -> None:
    """Write boxes into a client's file (`shared_file.make_shared`), block by block; without boxes open no file.

    Args:
        shares: the boxes that this rank stores.
        own_out: the file.

    Raises:
        NotFinite: tensors have NaN or infinite values; the message has their names.
        OSError: it cannot be written.
    """
    if not shares:
        return
    wrong = []
    with BoxWriter(own_out) as file:
        for share in shares:
            flat, is_finite = share.local.reshape(-1), True
            for start in range(0, flat.numel(), BLOCK_ELEMENTS):
                block = flat[start : start + BLOCK_ELEMENTS].detach().cpu()
                as_stored = block.float() if block.is_floating_point() else block.to(_whole(block.dtype))
                values = as_stored.numpy().astype(NUMPY_DTYPES[share.piece.dtype], copy=False)
                is_finite = is_finite and bool(np.isfinite(values).all())
                file.write(share.piece, start, values)
            wrong += [] if is_finite else [share.name]
    if wrong:
        raise NotFinite(f"NaN or infinite values in {', '.join(wrong)}")


def _whole(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype == torch.bool else dtype
