"""The count of an asynchronous run's invitations: each ends once, in the version that decides its fate.

An invitation may outlive its round by many versions. Its round's record is amended then, but the round's line is
already written: so a line states the invitations that ended since the previous line, from any round.

    sum over all lines of `invited` = sum over all lines of the fates + invitations still open after the last line
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from atoll.protocol.vocabulary import Fate, RoundId
from atoll.server.rounds.record import RoundRecord

SO_FAR = "so_far"


class InvitationTally:
    """Count of the fates of an asynchronous run's invitations.

    Args:
        saved: the `saved` of a run that is resumed; empty: the run begins.
    """

    def __init__(self, saved: Mapping[str, Mapping[str, int]]) -> None:
        rounds = {name: counts for name, counts in saved.items() if name != SO_FAR}
        self._known = {
            RoundId(int(name)): Counter({Fate(fate): number for fate, number in counts.items()})
            for name, counts in rounds.items()
        }
        self.so_far: Counter[str] = Counter(saved.get(SO_FAR, {}))
        """Totals since the beginning of the run: `invited`, `too_old`, and the number of each fate."""

    @property
    def saved(self) -> dict[str, dict[str, int]]:
        """Whole state, in JSON types."""
        rounds = {str(number): {str(fate): n for fate, n in fates.items()} for number, fates in self._known.items()}
        return {**rounds, SO_FAR: dict(self.so_far)}

    def ended(self, records: Iterable[RoundRecord]) -> Counter[Fate]:
        """Count the invitations of all rounds that have ended since the last call; return the number of each fate.

        A lost client that has resumed its work is subtracted, so a number may be negative.

        Args:
            records: the records of all rounds that still have invitations, the newest first.
        """
        ended: Counter[Fate] = Counter()
        kept: dict[RoundId, Counter[Fate]] = {}
        for record in records:
            now = kept[record.round_id] = _fates_of(record)
            before = self._known.get(record.round_id, Counter())
            ended.update(now)
            ended.subtract(before)
            self.so_far["invited"] += now.total() - before.total()
            if record.round_id not in self._known:
                self.so_far["too_old"] += len(record.too_old)
        self._known = kept
        del ended[Fate.WAITING]
        for fate, number in ended.items():
            self.so_far[str(fate)] += number
        return ended


def _fates_of(record: RoundRecord) -> Counter[Fate]:
    return Counter(client.fate for client in record.clients.values())
