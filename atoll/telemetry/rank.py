"""The readings of an aggregation rank."""

from atoll.protocol.identity.keeper import Keeper
from atoll.server.ranks.rank import Rank
from atoll.telemetry import instruments
from atoll.telemetry.instruments import Reading
from atoll.telemetry.process import certificate_end, free_bytes


class RankReadings:
    """Readings of one aggregation rank.

    Args:
        rank: the rank.
        keeper: its credential; None: it is insecure.
    """

    def __init__(self, rank: Rank, keeper: Keeper | None) -> None:
        self._rank, self._keeper = rank, keeper

    def read(self) -> Reading:
        """Return the values of now."""
        rank = self._rank
        found: Reading = {
            "atoll.update.io": [({instruments.DIRECTION: "receive"}, rank.uploads.received_bytes)],
            "atoll.model.io": [({instruments.DIRECTION: "transmit"}, rank.sent_bytes)],
            "atoll.rank.io": [({instruments.RANK: rank.place.rank}, rank.exchanged_bytes)],
        }
        return found | certificate_end(self._keeper)

    def read_elsewhere(self) -> Reading:
        """Return the values that are read from the disk; on any thread."""
        return free_bytes(self._rank.folder)
