"""The arithmetic of an example and the peak of a device: their quotient is the utilization (MFU).

The products of matrices, convolutions and attention of one forward and backward pass are counted, a multiplication and
an addition as two, on a copy of the model without memory. For a decoder that is, per token,

    6 N_matmul + 12 L h s        N_matmul parameters in matrices, L layers, h features, s tokens of the sequence

without a discount for the causal mask, and without the repetition of recomputation (Chowdhery et al., "PaLM", 2022,
appendix B; the convention of torchtitan).
"""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from atoll.parallel.data.batch import map_tensors, tensors
from atoll.task.task import Task
from atoll.training.model.parameters import model_on_meta

PEAKS = {
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "A10": (125e12, 31.2e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
}
"""Peak of dense products [FLOP/s] by a word in the device's name: at 16 bits, and at float32 without tensor cores; from
NVIDIA's data sheets."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak of a device [FLOP/s]; None if it is unknown.

    Args:
        device: the device of this rank.
        precision: fp32 or bf16.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    found = next((peaks for word, peaks in PEAKS.items() if word in name), None)
    return found and found[0 if precision == "bf16" else 1]


def flops_per_example(task: Task, inputs: Any) -> float | None:
    """Return the FLOP of one forward and backward pass; None if the model cannot be built or run without memory.

    Args:
        task: the task with its model.
        inputs: the inputs of at least one example.
    """
    model = model_on_meta(task)
    try:
        one = map_tensors(lambda tensor: tensor[:1].to("meta"), inputs)
        with FlopCounterMode(display=False) as counter:
            outputs = model.to("meta").train()(one)
            torch.stack([tensor.sum() for tensor in tensors(outputs)]).sum().backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return float(counter.get_total_flops())
