"""Random numbers from a key: the AES-256-CTR stream as numpy's `Generator`, and as tensors of torch.

Exact: the bits. Equal keys give equal bits on every machine, and bits of an unknown key cannot be told from random ones
(AES as a pseudorandom permutation; far fewer than 2^64 blocks). The numbers that numpy computes from them depend on its
version, as for all of its generators.

Not exact: the distribution of floats. A normal number is rounded to float64, or further to the tensor's dtype, and has
gaps that show which values it was added to (Mironov, "On significance of the least significant bits for differential
privacy", CCS 2012). A guarantee of epsilon and delta needs discrete noise on a grid, for which this generator gives the
bits.

Importing this file imports neither `cryptography` nor torch.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from atoll.ground.noise.key import BYTES

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 4096
NORMALS_AT_ONCE = 1 << 18
MT_WORDS = 624
"""Number of 32-bit words in a state of the Mersenne Twister, torch's generator on a CPU."""

_NEXT_64, _NEXT_32 = ctypes.CFUNCTYPE(ctypes.c_uint64), ctypes.CFUNCTYPE(ctypes.c_uint32)
_NEXT_DOUBLE = ctypes.CFUNCTYPE(ctypes.c_double)
# They are declared without their argument, the state: a caller passes it in a register that they do not read.


class _Interface(ctypes.Structure):
    """The C structure `bitgen_t` of numpy."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("next_uint64", _NEXT_64),
        ("next_uint32", _NEXT_32),
        ("next_double", _NEXT_DOUBLE),
        ("next_raw", _NEXT_64),
    )


_address_of: Callable[[object, bytes], int] = ctypes.pythonapi.PyCapsule_GetPointer
_address_of.restype, _address_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]  # type: ignore[attr-defined]


class KeyedBits(np.random.BitGenerator):
    """The AES-256-CTR stream of a key from counter 0, as a bit generator of numpy; 0.25 us for each number.

    The functions that numpy calls are iterators in C, without a step in Python: ctypes could not raise an interruption
    there, and would return 0.

    Args:
        key: 32 bytes.

    Raises:
        ValueError: the key has another size.
        ModuleNotFoundError: `cryptography` is not installed here.
    """

    def __init__(self, key: bytes) -> None:
        super().__init__(0)  # numpy's own seed sequence, which nothing uses
        self._update = _encryptor_of(key).update
        words = map(partial(np.frombuffer, dtype="<u8"), map(self._update, repeat(bytes(BLOCK_BYTES))))
        halves, doubles = repeat(11), repeat(2.0**-53)
        of_64 = _numbers(words).__next__
        of_double = _numbers(map(np.multiply, map(np.right_shift, words, halves), doubles)).__next__
        self._called = _NEXT_64(of_64), _NEXT_32(of_64), _NEXT_DOUBLE(of_double)  # kept as long as numpy may call them
        interface = _Interface.from_address(_address_of(self.capsule, b"BitGenerator"))
        interface.next_uint64 = interface.next_raw = self._called[0]
        interface.next_uint32, interface.next_double = self._called[1:]

    def words(self, count: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
        """Return the next 64-bit words of the stream, after the blocks that were begun."""
        with self.lock:
            return np.frombuffer(self._update(bytes(8 * count)), "<u8")

    def __reduce__(self) -> NoReturn:
        _refuse_copies()


class SecretGenerator(np.random.Generator):
    """The random numbers of a key: all methods of `numpy.random.Generator`, and those for torch."""

    def __init__(self, key: bytes) -> None:
        self._bits = KeyedBits(key)
        super().__init__(self._bits)

    def fill_normal_(self, tensor: "torch.Tensor", std: float = 1.0) -> "torch.Tensor":
        """Fill a tensor in place with N(0, std^2), and return it: 20 ns for each number.

        By Box and Muller (1958) in float64, each pair of numbers from two of 53 bits:

            sqrt(-2 ln u) cos(2 pi v), sqrt(-2 ln u) sin(2 pi v)          u in (0, 1], v in [0, 1)

        so that the largest is 8.6 std. Only then they are rounded to the tensor's dtype.

        Args:
            tensor: a tensor of floats, on any device.
            std: the standard deviation, at least 0.

        Raises:
            ValueError: `std` is negative or not finite, or the tensor has no floats.
        """
        import torch

        if not 0.0 <= std < float("inf"):
            raise ValueError(f"std: got {std!r}; allowed: a finite number of at least 0")
        if not tensor.is_floating_point():
            raise ValueError(f"noise needs a tensor of floats, got {tensor.dtype}")
        count = tensor.numel()
        found = np.empty(count, np.float64)
        for begin in range(0, count, NORMALS_AT_ONCE):
            part = found[begin : begin + NORMALS_AT_ONCE]
            part[:] = self._normals(len(part))
        with torch.no_grad():
            values = torch.from_numpy(found).mul_(std).reshape(tensor.shape)
            return tensor.copy_(values.to(device=tensor.device, dtype=tensor.dtype))

    def _normals(self, count: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
        pairs = -(-count // 2)
        words = self._bits.words(2 * pairs) >> 11
        u, v = words[:pairs], words[pairs:]
        radius, angle = np.sqrt(-2.0 * np.log((u + 1) * 2.0**-53)), v * (2.0 * np.pi * 2.0**-53)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def torch_generator(self) -> "torch.Generator":
        """Return a generator of torch on the CPU, whose whole state is drawn here, for a library that takes one.

        `manual_seed` would take 32 bits of a secret, which are soon guessed. Torch's numbers come from a Mersenne
        Twister: 624 of them determine the rest, so secret noise should come from `fill_normal_`.
        """
        import torch

        generator = torch.Generator()
        generator.set_state(self.torch_state(generator.get_state()))
        return generator

    def torch_state(self, like: "torch.Tensor") -> "torch.Tensor":
        """Return a state for a generator of torch on the CPU.

        Args:
            like: a state, whose form it takes: the seed, the place in the words, the words of 64 bits, and a number
                that was drawn and not used yet.
        """
        import torch

        state = like.clone().numpy()
        place, words = state[8:24].view("<i4"), state[24 : 24 + 8 * MT_WORDS].view("<u8")
        place[:] = (1, 1, 0, 0)  # none of the words was used: the next call makes new ones of them
        words[:] = self.integers(0, 2**32, MT_WORDS, dtype=np.uint64)
        state[24 + 8 * MT_WORDS :] = 0
        return torch.from_numpy(state)

    def __reduce__(self) -> NoReturn:
        _refuse_copies()


def words_of(key: bytes, count: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    """Return the first 64-bit words of a key's stream, as `KeyedBits.words`, without a bit generator of numpy.

    Raises:
        ValueError, ModuleNotFoundError: as in `KeyedBits`.
    """
    return np.frombuffer(_encryptor_of(key).update(bytes(8 * count)), "<u8")


def _encryptor_of(key: bytes) -> Any:
    """Return the encryptor of a key: of zeros, its output is the stream."""
    if len(key) != BYTES:
        raise ValueError(f"a key of noise has {BYTES} bytes, got {len(key)}")
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ModuleNotFoundError as error:
        what = "secret noise needs the package cryptography in the environment of the task"
        raise ModuleNotFoundError(f"{what}: pip install cryptography", name=error.name) from error
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()


def _numbers(blocks: "Iterator[np.ndarray[Any, Any]]") -> Iterator[Any]:
    return chain.from_iterable(map(methodcaller("tolist"), blocks))


def _refuse_copies() -> NoReturn:
    raise TypeError("a generator of secret noise is not copied: both would draw the same noise, which cancels")
