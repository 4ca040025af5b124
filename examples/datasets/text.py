"""A text corpus as one row of tokens on disk, and its windows for a language model."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch

from atoll.ground.printable import count_of
from atoll.parallel.data.batch import IGNORED

PIECE_BYTES = 1 << 24
"""Approximate size of the pieces in which a longer document is tokenized; they end with a line, and bound the
memory."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The conversion of bytes to tokens."""

    encode: Callable[[bytes], Sequence[int] | npt.NDArray[Any]]
    """A document, or a piece of it, -> its tokens, without an end."""

    eos: int
    """The token that ends a document."""

    vocab_size: int
    """The number of tokens, 0 .. vocab_size - 1, with `eos` among them."""


BYTES = Tokenizer(lambda piece: np.frombuffer(piece, np.uint8), eos=256, vocab_size=257)
"""The tokenizer in which every byte is a token."""


def text_tokenizer(encode: Callable[[str], Sequence[int]], *, eos: int, vocab_size: int) -> Tokenizer:
    """Return a tokenizer of strings, such as one of Hugging Face; invalid UTF-8 becomes U+FFFD."""
    return Tokenizer(lambda piece: encode(piece.decode("utf-8", "replace")), eos, vocab_size)


def pack_text(paths: Iterable[Path], out: Path, tokenizer: Tokenizer = BYTES, *, piece_bytes: int = PIECE_BYTES) -> int:
    """Write the tokens of all files, each one document with its end, as a flat .npy file of uint16 or uint32.

    The memory is that of a piece and its tokens. The file appears under its name when it is complete.

    Returns:
        The number of tokens.

    Raises:
        ValueError: the tokenizer returns a token outside of its vocabulary.
    """
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    partial = out.with_name(f"{out.name}.partial")
    with partial.open("wb") as file:
        _write_header(file, dtype, 0)
        begin = file.tell()
        for path in paths:
            for tokens in _tokens_of(path, tokenizer, piece_bytes):
                file.write(tokens.astype(dtype).tobytes())
        num_tokens = (file.tell() - begin) // dtype.itemsize
        file.seek(0)
        _write_header(file, dtype, num_tokens)
        assert file.tell() == begin, "numpy leaves room for the length to grow"
        file.flush()
        os.fsync(file.fileno())
    partial.replace(out)
    return num_tokens


def load_tokens(path: Path) -> npt.NDArray[Any]:
    """Map the tokens that `pack_text` has written into memory, without reading them.

    Raises:
        ValueError: it is no flat .npy file of uint16 or uint32.
    """
    tokens: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
        raise ValueError(f"{path}: must be flat and uint16 or uint32, got {tokens.dtype} of shape {tokens.shape}")
    return tokens


class TokenWindows:
    """A map-style data set of (inputs, targets), both (sequence,) int64; a target is the token after its input.

    Window i has the tokens i S .. (i + 1) S as inputs, so that every token but the first is a target once. The last
    window ends with the tokens: the targets that it shares with the window before are masked with -100.

    A window may hold parts of several documents, and attention sees across their ends; with `eos` at least the loss
    leaves out the first token of each document, which the tokens before it do not predict.

    Args:
        tokens: a flat array, or any object with a length and slices that are arrays.
        sequence: inputs of one window (S >= 1).
        eos: the end of a document, whose targets are masked; None: they count.

    Raises:
        ValueError: there are fewer than sequence + 1 tokens.
    """

    def __init__(self, tokens: Any, sequence: int, *, eos: int | None = None) -> None:
        if not 1 <= sequence < len(tokens):
            raise ValueError(
                f"sequence: must be at least 1 and below the {count_of(len(tokens), 'token')}, got {sequence}"
            )
        self._tokens, self._sequence, self._eos = tokens, sequence, eos

    def __len__(self) -> int:
        return -(-(len(self._tokens) - 1) // self._sequence)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        wanted = index * self._sequence
        start = min(wanted, len(self._tokens) - 1 - self._sequence)
        window = torch.from_numpy(self._tokens[start : start + self._sequence + 1].astype(np.int64))
        inputs, targets = window[:-1], window[1:].clone()
        targets[: wanted - start] = IGNORED
        if self._eos is not None:
            targets[inputs == self._eos] = IGNORED
        return inputs, targets

    def shards(self, num_windows: int) -> tuple[int, ...]:
        """Return sizes of runs of `num_windows`: the order's `shards`, for tokens that are slow to read at random."""
        return tuple(min(num_windows, len(self) - start) for start in range(0, len(self), num_windows))


def packed(
    documents: Iterable[bytes], sequence: int, tokenizer: Tokenizer = BYTES, *, is_masked: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the windows of `TokenWindows` from a stream of documents; fewer than S tokens at the end are dropped.

    Args:
        documents: one after the other.
        sequence: inputs of one window.
        tokenizer: its `eos` follows each document.
        is_masked: leave the first token of each document out of the loss.
    """
    tokens = np.empty(0, np.int64)
    for document in documents:
        tokens = np.concatenate([tokens, _checked(tokenizer, document), [tokenizer.eos]])
        while len(tokens) > sequence:
            yield TokenWindows(tokens[: sequence + 1], sequence, eos=tokenizer.eos if is_masked else None)[0]
            tokens = tokens[sequence:]


def _tokens_of(path: Path, tokenizer: Tokenizer, piece_bytes: int) -> Iterator[npt.NDArray[np.int64]]:
    with path.open("rb") as file:
        for piece in _pieces(file, piece_bytes):
            try:
                yield _checked(tokenizer, piece)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    yield np.array([tokenizer.eos])


def _checked(tokenizer: Tokenizer, piece: bytes) -> npt.NDArray[np.int64]:
    tokens = np.asarray(tokenizer.encode(piece), dtype=np.int64)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size:
        raise ValueError(f"tokens must be in 0..{tokenizer.vocab_size - 1}, got {tokens.min()}..{tokens.max()}")
    return tokens


def _pieces(file: IO[bytes], piece_bytes: int) -> Iterator[bytes]:
    """Yield a file's bytes in pieces; each but the last ends with a line, if it contains a line's end."""
    piece = file.read(piece_bytes)
    while block := file.read(piece_bytes):
        end = piece.rfind(b"\n") + 1 or len(piece)
        yield piece[:end]
        piece = piece[end:] + block
    if piece:
        yield piece


def _write_header(file: IO[bytes], dtype: np.dtype[Any], length: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, header)
