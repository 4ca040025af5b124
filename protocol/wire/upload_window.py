"""How far an upload may run ahead of what the receiver has confirmed: less, the more of them there are at one time.

    window = at most 4 MiB, at least 256 KiB, of n uploads that are under way a share of 16 MiB
    chunk  = a quarter of it, at most 1 MiB

What is sent and not yet taken lies in the receiver's memory, so that of a crowd there is no more than of a few. The
receiver says its window with each confirmation, and confirms after half of the one that it has said last, and after
each chunk that is smaller than a quarter of it: so a sender that keeps within it never waits for good.
"""

from atoll.protocol.wire.channel import CHUNK_BYTES, MIB, UPLOAD_WINDOW_BYTES

UPLOADS_BYTES = 16 * MIB
"""Of all uploads together, unless there are more than 64."""

WINDOW_BYTES_MIN = MIB // 4


def window_of(num_uploads: int) -> int:
    """Bytes that each of so many uploads may have in flight."""
    return max(WINDOW_BYTES_MIN, min(UPLOAD_WINDOW_BYTES, UPLOADS_BYTES // max(1, num_uploads)))


def chunk_of(window: int) -> int:
    """Bytes of a full chunk under a window; at least 1."""
    return max(1, min(CHUNK_BYTES, window // 4))


class Confirmations:
    """What the receiver of one upload says to its sender.

    Args:
        position: bytes that were there before.
        window: said with it.
    """

    def __init__(self, position: int, window: int) -> None:
        self._confirmed, self._window = position, window

    def is_due(self, position: int, num_bytes: int) -> bool:
        """Whether to confirm, after a chunk of so many bytes that ends at this position."""
        return num_bytes < chunk_of(self._window) or position - self._confirmed >= self._window // 2

    def said(self, position: int, window: int) -> None:
        """It is confirmed up to here."""
        self._confirmed, self._window = position, window
