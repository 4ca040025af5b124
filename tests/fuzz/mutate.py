"""Mutated inputs, fast: a few microseconds each, the same ones for the same seed."""

import random
from collections.abc import Iterator, Sequence

BLOCK = 1000
"""Inputs that follow from one seed: whoever wants input 123,456 makes no more than a block of them."""

NUMBERS = [str(n).encode() for n in (0, -1, 1, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63))]
TOKENS = [
    *NUMBERS,
    *(b"1e400", b"-0", b"0x10", b"NaN", b"Infinity", b"-inf", b"nan", b"null", b"true", b"[]", b"{}", b'""', b"''"),
    *(b"\x00", b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\\u0000", b"\\ud800", b"\n", b"\r", b"\t", b" ", b"#"),
    *(b"[" * 200, b"{" * 200, b'{"a":' * 200, b"(" * 50, b"9" * 400, b"9" * 5000, b"a" * 300, b"\\" * 9),
    *(b"../../", b"%s%n", b"\x80\x80\x80\x80\x80", b"\x30\x84\xff\xff\xff\xff", b"\xa0\x80", b"--", b"=", b".", b","),
]


def mutated(corpus: Sequence[bytes], tokens: Sequence[bytes], seed: str, begin: int, end: int) -> Iterator[bytes]:
    """Inputs `begin` to `end` of a seed; the first ones are the corpus itself.

    Args:
        corpus: valid inputs.
        tokens: that mean something to the parser, besides TOKENS.
        seed: whose.
        begin, end: multiples of BLOCK.
    """
    words = [*tokens, *TOKENS]
    if begin == 0:
        yield from corpus
    for block in range(begin // BLOCK, end // BLOCK):
        draw = random.Random(f"{seed} {block}").random
        for _ in range(BLOCK):
            yield _mutate(draw, corpus, words)


def _mutate(draw: "random._random.Random.random", corpus: Sequence[bytes], words: Sequence[bytes]) -> bytes:  # type: ignore[name-defined]
    data = bytearray(corpus[int(draw() * len(corpus))])
    for _ in range(1 + int(draw() * draw() * 5)):
        size, kind = len(data), int(draw() * 8)
        at = int(draw() * (size + 1))
        if kind == 0 and at < size:
            data[at] ^= 1 << int(draw() * 8)
        elif kind == 1 and at < size:
            data[at] = int(draw() * 256)
        elif kind == 2:
            data[at:at] = words[int(draw() * len(words))]
        elif kind == 3:
            data[at : at + 1 + int(draw() * 8)] = words[int(draw() * len(words))]
        elif kind == 4:
            del data[at : at + 1 + int(draw() * draw() * size)]
        elif kind == 5:
            other = int(draw() * (size + 1))
            data[at:at] = data[other : other + 1 + int(draw() * 40)]
        elif kind == 6:
            other_one = corpus[int(draw() * len(corpus))]
            data[at:] = other_one[int(draw() * (len(other_one) + 1)) :]
        else:
            data[at : at + int(draw() * 3)] = bytes((int(draw() * 256), int(draw() * 256)))
    return bytes(data)
