"""The placement of workers on GPUs: the device of each worker, and its share there. Pure."""

import math
from collections.abc import Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that limits the GPUs that CUDA shows a process, read when the process first uses one."""

SHARES = 10_000
"""Number of equal parts of a GPU that Ray distinguishes."""


def placed(workers: int, devices: Sequence[int]) -> list[int]:
    """Return the device of each worker: the workers take turns, so no two devices differ by more than one worker.

    Args:
        workers: their number.
        devices: the numbers of the devices, at least one.
    """
    return [devices[worker % len(devices)] for worker in range(workers)]


def share_of_gpu(workers: int, gpus: int) -> float:
    """Return each worker's share of a GPU, so that the fullest GPU holds all of its workers: 1 / ceil(workers / gpus).

    It is rounded down to Ray's resolution, so that the workers of a GPU never need more than all of it.
    """
    return SHARES // math.ceil(workers / gpus) / SHARES


def visible(number: int, listed: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process with one device.

    Args:
        number: the device, as this process numbers them.
        listed: CUDA_VISIBLE_DEVICES of this process; None: it sees all.
    """
    names = [name.strip() for name in (listed or "").split(",") if name.strip()]
    return names[number] if number < len(names) else str(number)


def faults_of(devices: Sequence[int], device: str, count: int) -> list[str]:
    """Return the faults of the setting `simulation.devices`; `count` is the number of GPUs that torch finds."""
    if not devices:
        return []
    if device == "cpu":
        return [f'simulation.devices: got {list(devices)}, which are GPUs, and simulation.device is "cpu"; set "cuda"']
    if len(set(devices)) < len(devices):
        return [f"simulation.devices: got {list(devices)}; allowed: each GPU once (more workers than GPUs share them)"]
    if odd := [number for number in devices if number >= count]:
        return [f"simulation.devices: got {odd[0]}; allowed here: 0 to {count - 1}, the GPUs that torch finds"]
    return []
