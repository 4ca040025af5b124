"""Tokens and their windows, against plain Python over bytes."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.parallel.data.batch import count_units
from examples.datasets.streaming import ByteTokens
from examples.datasets.text import BYTES, Tokenizer, TokenWindows, load_tokens, pack_text, packed, text_tokenizer

DOCUMENTS = [b"one\ntwo\n\nthree", b"", "für\nalle".encode(), b"\xff\xfe no UTF-8\n", b"x" * 300]
FLAT = [token for document in DOCUMENTS for token in (*document, 256)]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"{index}.txt" for index in range(len(DOCUMENTS))]
    for path, document in zip(found, DOCUMENTS, strict=True):
        path.write_bytes(document)
    return found


@pytest.mark.parametrize("piece_bytes", [1, 4, 7, 1 << 20])
def test_packed_bytes_are_the_documents_with_their_ends(paths: list[Path], tmp_path: Path, piece_bytes: int) -> None:
    assert pack_text(paths, tmp_path / "tokens.npy", piece_bytes=piece_bytes) == len(FLAT)
    tokens = load_tokens(tmp_path / "tokens.npy")
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == FLAT
    assert [path.name for path in tmp_path.iterdir() if "tokens" in path.name] == ["tokens.npy"]


def test_text_files_read_in_place_are_what_packing_writes(paths: list[Path]) -> None:
    tokens = ByteTokens(paths)
    assert len(tokens) == len(FLAT)
    for start in range(0, len(FLAT), 3):
        for stop in range(start, min(len(FLAT), start + 40), 7):
            assert tokens[start:stop].tolist() == FLAT[start:stop]
    assert tokens[0 : len(FLAT)].tolist() == FLAT
    with pytest.raises(ValueError, match="only runs of tokens can be read, got a step of 2"):
        tokens[::2]


def test_a_file_that_has_become_shorter_is_noticed(paths: list[Path]) -> None:
    tokens = ByteTokens(paths)
    paths[-1].write_bytes(b"x")
    with pytest.raises(OSError, match=r"4\.txt has become shorter"):
        tokens[0 : len(FLAT)]


def test_pieces_end_with_lines_and_no_character_is_cut(tmp_path: Path) -> None:
    lines = [f"Zeile {index} mit Ümläuten\n" for index in range(200)]
    (tmp_path / "a.txt").write_text("".join(lines), "utf-8")
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return [ord(letter) for letter in text]

    tokenizer = text_tokenizer(encode, eos=0, vocab_size=0x110000)
    pack_text([tmp_path / "a.txt"], tmp_path / "tokens.npy", tokenizer, piece_bytes=100)
    assert len(seen) > 10
    assert all(text.endswith("\n") and len(text.encode()) <= 200 for text in seen)
    tokens = load_tokens(tmp_path / "tokens.npy")
    assert tokens.dtype == np.uint32
    assert "".join(map(chr, tokens[:-1])) == "".join(lines)


def test_a_token_outside_of_the_vocabulary_is_refused_and_leaves_no_file(paths: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0\.txt: tokens must be in 0\.\.99, got 10\.\.119"):
        pack_text(paths, tmp_path / "tokens.npy", Tokenizer(BYTES.encode, eos=99, vocab_size=100))
    assert not (tmp_path / "tokens.npy").exists()


def test_a_file_of_other_numbers_is_no_corpus(tmp_path: Path) -> None:
    np.save(tmp_path / "floats.npy", np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"flat and uint16 or uint32, got float64 of shape \(2, 3\)"):
        load_tokens(tmp_path / "floats.npy")


@settings(deadline=None)
@given(st.integers(2, 60), st.integers(1, 20))
def test_every_token_but_the_first_is_a_target_once_with_the_token_before_it(num_tokens: int, sequence: int) -> None:
    if sequence >= num_tokens:
        with pytest.raises(ValueError, match=f"below the {num_tokens} tokens, got {sequence}"):
            TokenWindows(np.arange(num_tokens), sequence)
        return
    windows = TokenWindows(np.arange(num_tokens, dtype=np.uint16), sequence)
    pairs = []
    for index in range(len(windows)):
        inputs, targets = windows[index]
        assert inputs.shape == targets.shape == (sequence,)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs, inputs[0] + torch.arange(sequence))
        pairs += [(i, t) for i, t in zip(inputs.tolist(), targets.tolist(), strict=True) if t != -100]
    assert pairs == [(token - 1, token) for token in range(1, num_tokens)]


def test_the_first_token_of_a_document_may_be_left_out_of_the_loss() -> None:
    tokens = np.array([5, 6, 256, 7, 8, 256, 9])
    inputs, targets = TokenWindows(tokens, 6, eos=256)[0]
    assert inputs.tolist() == [5, 6, 256, 7, 8, 256]
    assert targets.tolist() == [6, 256, -100, 8, 256, -100]
    assert count_units(targets) == 4
    assert TokenWindows(tokens, 6)[0][1].tolist() == [6, 256, 7, 8, 256, 9]


def test_windows_have_an_end_and_shards_that_cover_them() -> None:
    windows = TokenWindows(np.arange(100), 7)
    assert len(list(windows)) == len(windows) == 15  # type: ignore[call-overload]
    assert windows.shards(4) == (4, 4, 4, 3)


@pytest.mark.parametrize("is_masked", [False, True])
def test_documents_that_come_one_by_one_are_packed_as_on_disk(is_masked: bool) -> None:
    windows = TokenWindows(np.array(FLAT), 16, eos=256 if is_masked else None)
    whole = (len(FLAT) - 1) // 16
    found = list(packed(iter(DOCUMENTS), 16, is_masked=is_masked))
    assert len(found) == whole
    for index in range(whole):
        assert all(torch.equal(a, b) for a, b in zip(found[index], windows[index], strict=True))


def test_packing_takes_the_memory_of_a_piece_not_of_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "large.txt").write_bytes(b"a line of text\n" * 400_000)  # 6 MB
    tracemalloc.start()
    try:
        pack_text([tmp_path / "large.txt"], tmp_path / "tokens.npy", piece_bytes=1 << 16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
