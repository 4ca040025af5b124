"""Blocks of a flat gradient as bytes: int8 with a scale, or one bit with a scale, for every 1,024 elements.

Legend: v the elements of a block.

    int8    scale s = max|v| / 127, levels q = round(v / s); decoded as s q, so that the error is at most s / 2
    sign    scale s = mean |v|, bits v < 0; decoded as s or -s (0 counts as positive): biased, needs error feedback

A row is the scales (float32) of some blocks followed by their levels or bits. A block that holds an infinity or a NaN
is decoded to NaN or infinity, never to numbers: an overflow must not be lost on the way.

Sources: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019; int8:
symmetric linear quantisation, as in Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016.
"""

import torch

from atoll.parallel.communication.block_sizes import BLOCK, INT8_ROW, SIGN_ROW, num_blocks


def as_blocks(flat: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return (num_rows, blocks, 1024) float32 with the elements in order, padded with zeros."""
    blocks = flat.new_zeros(num_rows, num_blocks(flat.numel(), num_rows), BLOCK, dtype=torch.float32)
    blocks.view(-1)[: flat.numel()] = flat
    return blocks


def encode_int8(blocks: torch.Tensor) -> torch.Tensor:
    """Encode (rows, blocks, 1024) float32 as (rows, bytes) uint8."""
    scales = blocks.abs().amax(dim=2) / 127
    levels = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(2)).round().nan_to_num()
    return _row(scales, levels.clamp_(-127, 127).to(torch.int8).flatten(1).view(torch.uint8))


def decode_int8(rows: torch.Tensor) -> torch.Tensor:
    """Decode the rows of `encode_int8` to (rows, blocks, 1024) float32."""
    scales, levels = _parts(rows, INT8_ROW)
    return levels.view(torch.int8).view(*scales.shape, BLOCK) * scales.unsqueeze(2)


def encode_signs(blocks: torch.Tensor, num_elements: int) -> torch.Tensor:
    """Encode (rows, blocks, 1024) float32, of which the first `num_elements` count, as (rows, bytes) uint8."""
    starts = torch.arange(0, blocks.numel(), BLOCK, device=blocks.device).view(blocks.shape[:2])
    counts = (num_elements - starts).clamp(1, BLOCK)
    bits = (blocks < 0).view(len(blocks), -1, 8).to(torch.uint8)
    return _row(blocks.abs().sum(dim=2) / counts, (bits << _places(bits)).sum(dim=2, dtype=torch.uint8))


def decode_signs(rows: torch.Tensor) -> torch.Tensor:
    """Decode the rows of `encode_signs` to (rows, blocks, 1024) float32."""
    scales, packed = _parts(rows, SIGN_ROW)
    bits = (packed.unsqueeze(2) >> _places(packed)) & 1
    return (1 - 2 * bits.view(*scales.shape, BLOCK).to(torch.float32)) * scales.unsqueeze(2)


def _places(bits: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=bits.device)


def _row(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return torch.cat([scales.view(torch.uint8), codes], dim=1)


def _parts(rows: torch.Tensor, block_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales (rows, blocks), and the bytes of the codes."""
    num_bytes = 4 * (rows.shape[1] // block_bytes)
    return rows[:, :num_bytes].contiguous().view(torch.float32), rows[:, num_bytes:].contiguous()
