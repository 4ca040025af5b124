"""The largest memory of this rank in one round: of the GPU, or of this process without what it shares with others."""

from contextlib import suppress
from pathlib import Path

import torch

RESET = "5"
"""The word that sets the largest resident size of a process to its present one (proc(5), `clear_refs`)."""


class PeakMemory:
    """The largest memory since it was made.

    On a GPU: what PyTorch's allocator had given out. On a CPU: VmHWM - RssFile - RssShmem, the largest resident size
    without mapped files, such as libraries and versions (proc(5); 0 on a system without it).

    Args:
        device: of this rank.
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
