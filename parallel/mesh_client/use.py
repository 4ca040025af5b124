"""The use of a mesh in one round: speed, memory, and the model's operations beside the peak of the devices."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.trainer.flops import flops_per_example, peak_flops
from atoll.task.randomness import generators_kept
from atoll.task.task import Task
from atoll.training.worker.bench import Json

RESET = "5"
"""The word that sets the largest resident size of a process to its present one (proc(5), `clear_refs`)."""


class PeakMemory:
    """Meter of the largest memory of this process since the object was made.

    On a GPU: what PyTorch's allocator had given out. On a CPU: VmHWM - RssFile - RssShmem, the largest resident size
    without mapped files, such as libraries and versions (proc(5); 0 on a system without it).

    Args:
        device: the device of this rank.
        process: the folder of this process.
    """

    def __init__(self, device: torch.device, process: Path = Path("/proc/self")) -> None:
        self._device, self._process = device, process
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):  # without it: the largest size of its whole life
            (process / "clear_refs").write_text(RESET)

    @property
    def num_bytes(self) -> int:
        """The largest memory [bytes]."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        try:
            lines = (self._process / "status").read_text().splitlines()
        except OSError:
            return 0
        sizes = {
            name: 1024 * int(rest.split()[0])
            for name, _, rest in (line.partition(":") for line in lines if "kB" in line)
        }
        return max(sizes.get("VmHWM", 0) - sizes.get("RssFile", 0) - sizes.get("RssShmem", 0), 0)


class RoundUse:
    """The measurement of rounds on one mesh; every rank calls its methods at the same point.

    Args:
        ranks: the ranks of the mesh.
        device: the device of this rank.
        precision: the precision of the plan.
        clock: returns the present instant [s].
    """

    def __init__(self, ranks: Ranks, device: torch.device, precision: str, clock: Callable[[], float]) -> None:
        self._ranks, self._device, self._clock = ranks, device, clock
        peaks = ranks.gather(peak_flops(device, precision))
        self._peak_flops = float(sum(peaks)) if all(peaks) else 0.0
        self._flops: tuple[Task, float] | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a round: its memory is measured from now on."""
        self._memory = PeakMemory(self._device)
        self.begin_training()

    def begin_training(self) -> None:
        """Begin the steps of the round, whose time is measured from now on."""
        self._began = self._clock()

    def end_training(self) -> None:
        """End the steps of the round, whose time is measured until now."""
        self._seconds = max(self._clock() - self._began, 1e-9)

    def of(self, task: Task, inputs: Callable[[], Any], steps: int, examples: int) -> Json:
        """Return the use of a round, as `protocol/mesh_use` has it.

        Args:
            task: the task that was trained.
            inputs: returns an example's inputs; called on rank 0, once for a task.
            steps: the number of steps that this attempt has made.
            examples: the number of examples of these steps, on all ranks.
        """
        flops = self._flops_of(task, inputs) if self._ranks.is_first else 0.0
        return {
            "num_ranks": self._ranks.size,
            "peak_bytes": max(self._ranks.gather(self._memory.num_bytes)),
            "steps_per_s": steps / self._seconds,
            "flops_per_s": flops * examples / self._seconds,
            "peak_flops": self._peak_flops,
        }

    def _flops_of(self, task: Task, inputs: Callable[[], Any]) -> float:
        if self._flops is None or self._flops[0] is not task:
            with generators_kept():
                try:
                    found = flops_per_example(task, inputs()) or 0.0
                except Exception:  # any: the model's code, with tensors that have no values
                    found = 0.0
            self._flops = task, found
        return self._flops[1]
