"""The window of an upload: the bytes that it may have in flight, which shrinks as more uploads run concurrently.

    window = min(4 MiB, max(256 KiB, 16 MiB / n))    for n concurrent uploads
    chunk  = min(1 MiB, window / 4)

Bytes in flight occupy the receiver's memory, so its use does not grow with the number of uploads (up to 64). The
receiver sends its window with each confirmation. It confirms after half of the last window sent, and after each chunk
smaller than a quarter of it: so a sender that stays within the window never waits for ever.
"""

from atoll.protocol.wire.channel import CHUNK_BYTES, MIB, UPLOAD_WINDOW_BYTES

UPLOADS_BYTES = 16 * MIB
"""Bytes in flight of all uploads together; more only with over 64 uploads."""

WINDOW_BYTES_MIN = MIB // 4


def window_of(num_uploads: int) -> int:
    """Return the bytes that each of `num_uploads` concurrent uploads may have in flight."""
    return max(WINDOW_BYTES_MIN, min(UPLOAD_WINDOW_BYTES, UPLOADS_BYTES // max(1, num_uploads)))


def chunk_of(window: int) -> int:
    """Return the size of a full chunk under a window [bytes], at least 1."""
    return max(1, min(CHUNK_BYTES, window // 4))


class Confirmations:
    """Confirmations that the receiver of one upload sends.

    Args:
        position: bytes present before the upload.
        window: window of the first confirmation.
    """

    def __init__(self, position: int, window: int) -> None:
        self._confirmed, self._window = position, window

    def is_due(self, position: int, num_bytes: int) -> bool:
        """Return whether to confirm after a chunk of `num_bytes` that ends at `position`."""
        return num_bytes < chunk_of(self._window) or position - self._confirmed >= self._window // 2

    def said(self, position: int, window: int) -> None:
        """Record a confirmation that was sent."""
        self._confirmed, self._window = position, window
