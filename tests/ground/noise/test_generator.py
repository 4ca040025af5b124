"""The generator of a key: the bits of AES-256-CTR, the distributions, and what it refuses."""

import copy
import pickle

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from atoll.ground.noise.generator import BLOCK_BYTES, MT_WORDS, KeyedBits, SecretGenerator

KEY = bytes(range(32))
COUNT = 200_000


def stream(count: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """The words of the cipher itself; the first block is that of FIPS 197's key schedule for this key."""
    return np.frombuffer(Cipher(algorithms.AES(KEY), modes.CTR(bytes(16))).encryptor().update(bytes(8 * count)), "<u8")


def test_the_bits_are_those_of_the_cipher_over_many_blocks() -> None:
    count = 3 * BLOCK_BYTES // 8 + 5
    assert KeyedBits(KEY).random_raw(count).tolist() == stream(count).tolist()
    words = SecretGenerator(KEY).integers(0, 2**64, count, dtype=np.uint64)
    assert words.tolist() == stream(count).tolist()
    assert SecretGenerator(KEY).random(count).tolist() == ((stream(count) >> 11) * 2.0**-53).tolist()


def test_equal_keys_give_equal_numbers_and_others_others() -> None:
    first, again, other = SecretGenerator(KEY), SecretGenerator(KEY), SecretGenerator(bytes(32))
    drawn = [(g.normal(size=3), g.integers(9, size=4), g.random(), g.permutation(5)) for g in (first, again, other)]
    assert np.array_equal(drawn[0][0], drawn[1][0])
    assert drawn[0][2] == drawn[1][2]
    assert not np.any(drawn[0][0] == drawn[2][0])
    assert not np.any(first.normal(size=1000) == SecretGenerator(KEY).normal(size=1000)), "it goes on"


def test_normal_numbers_are_normal() -> None:
    tensor = SecretGenerator(KEY).fill_normal_(torch.empty(COUNT, dtype=torch.float64), std=2.0).numpy() / 2.0
    for found in (SecretGenerator(KEY).normal(size=COUNT), tensor):
        counts = np.histogram(found, bins=[-np.inf, -2, -1, 0, 1, 2, np.inf])[0]
        shares = np.array([0.022750, 0.135905, 0.341345, 0.341345, 0.135905, 0.022750])
        assert (np.square(counts - COUNT * shares) / (COUNT * shares)).sum() < 25.7, "chi-square, 5 degrees, p = 1e-4"
        assert abs(found.std() - 1.0) < 0.01
        assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tensor_is_filled_in_place_in_its_dtype(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5, dtype=dtype, requires_grad=True)
    assert SecretGenerator(KEY).fill_normal_(tensor, 0.5) is tensor
    like = SecretGenerator(KEY).fill_normal_(torch.empty(15, dtype=torch.float64), 0.5)
    assert tensor.detach().flatten().equal(like.to(dtype))
    assert tensor.grad_fn is None
    transposed = torch.zeros(5, 3, dtype=torch.float64).t()
    assert SecretGenerator(KEY).fill_normal_(transposed, 0.5).flatten().equal(like), "by place, whatever its strides"


def test_what_noise_cannot_be_is_refused() -> None:
    generator = SecretGenerator(KEY)
    for std in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"std: got .*; allowed: a finite number of at least 0"):
            generator.fill_normal_(torch.empty(2), std)
    with pytest.raises(ValueError, match=r"floats, got torch\.int64"):
        generator.fill_normal_(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="a key of noise has 32 bytes, got 4"):
        SecretGenerator(b"four")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_generator_is_not_copied(copied) -> None:
    with pytest.raises(TypeError, match="both would draw the same noise, which cancels"):
        copied(SecretGenerator(KEY))


def test_a_generator_of_torch_has_its_whole_state_from_the_key() -> None:
    """Of a seed, torch's generator on a CPU takes 32 bits. Its words are those of numpy's Mersenne Twister."""
    found = SecretGenerator(KEY).torch_generator()
    twister = np.random.MT19937()
    words = SecretGenerator(KEY).integers(0, 2**32, MT_WORDS, dtype=np.uint64).astype(np.uint32)
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": MT_WORDS}}
    drawn = [int(torch.randint(2**31, (1,), generator=found)) for _ in range(700)]
    assert drawn == (twister.random_raw(1400)[1::2] % 2**31).tolist()
    assert abs(float(torch.randn(COUNT, generator=found).std()) - 1.0) < 0.01
