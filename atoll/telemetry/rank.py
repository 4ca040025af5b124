"""The readings of an aggregation rank."""

from atoll.server.ranks.rank import Rank
from atoll.telemetry import instruments
from atoll.telemetry.instruments import Reading
from atoll.telemetry.process import free_bytes


class RankReadings:
    """Readings of one aggregation rank.

    Args:
        rank: the rank.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def read(self) -> Reading:
        """Return the values of now."""
        rank = self._rank
        return {
            "atoll.update.io": [({instruments.DIRECTION: "receive"}, rank.uploads.received_bytes)],
            "atoll.model.io": [({instruments.DIRECTION: "transmit"}, rank.sent_bytes)],
            "atoll.rank.io": [({instruments.RANK: rank.place.rank}, rank.exchanged_bytes)],
            "atoll.series.dropped": [({instruments.LEFT_OUT: "series"}, 0)],
        }

    def read_elsewhere(self) -> Reading:
        """Return the values that are read from the disk; on any thread."""
        return free_bytes(self._rank.folder)
