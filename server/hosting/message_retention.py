"""The retention of a run of messages: which contents, replies and rows are kept, and the deletion of all others.

A content is on disk while an exchange with it is open, or the program is about to send it. Replies are kept while a
process of the program may repeat their exchange: until the run has finished, or only for the newest
`program.keep_replies` exchanges.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import Digest, RunId, RunState, Version
from atoll.server.exchanges.ledger import Ledger
from atoll.server.hosting.retention import FOLLOWED_S, Retention, Spawn
from atoll.server.hosting.run_parts import SharedParts
from atoll.server.journal.pruning import Stay
from atoll.server.programs.contents import Contents


@dataclass(frozen=True, slots=True)
class Kept:
    """Parts of a run that must be kept after an event."""

    at: float
    contents: frozenset[Digest]
    first: int
    """First exchange whose replies are kept."""
    num_exchanges: int

    @classmethod
    def after(cls, ledger: Ledger, keep_replies: int) -> "Kept":
        """Return what must be kept after the last event of a ledger."""
        num_exchanges = ledger.num_exchanges
        first = num_exchanges + 1 if ledger.state is RunState.FINISHED else ledger.first_kept(keep_replies)
        unpulled = [ledger.exchange_of(min(ledger.unpulled))] if ledger.unpulled and ledger.is_open else []
        return cls(ledger.now, _contents_of(ledger), max(1, min([first, *ledger.open, *unpulled])), num_exchanges)


def _contents_of(ledger: Ledger) -> frozenset[Digest]:
    asked = [held.asked for held in ledger.process.held] + ledger.process.paused
    waiting = [message.content for one in asked for message in one.messages]
    return frozenset([*waiting, *(one.message.content for e in ledger.open.values() for one in e.sent)])


@dataclass(frozen=True, slots=True)
class _AllBut:
    """Set of all updates except these."""

    dead: frozenset[Digest]

    def __contains__(self, digest: object) -> bool:
        return digest not in self.dead


class MessageRetention(Retention[Kept]):
    """Retention of a run of messages.

    Args:
        run_id: the run.
        ledger: returns its current state.
        contents: the contents of its messages, and the files of its replies.
        shared: the parts that all runs share.
        keep_replies: the number of newest exchanges whose replies are kept; 0: all.
        spawn: see `Spawn`.
    """

    def __init__(
        self,
        run_id: RunId,
        ledger: Callable[[], Ledger],
        contents: Contents,
        shared: SharedParts,
        keep_replies: int,
        spawn: Spawn,
    ) -> None:
        super().__init__(run_id, shared, spawn)
        self._ledger, self._contents, self.keep_replies = ledger, contents, keep_replies
        self.being_read: dict[int, int] = {}
        """First exchange among the replies that a call has received and not read yet."""
        self._dropped = 0

    def after(self, offered: Collection[Digest] = ()) -> Callable[[], None]:
        """Return the collection that may begin once the last event is on disk.

        Args:
            offered: the contents that this event has sent; until then they are kept, even if the exchange is over.
        """
        return partial(self._begin, Kept.after(self._ledger(), self.keep_replies), offered)

    def _begin(self, kept: Kept, offered: Collection[Digest]) -> None:
        self._contents.sent(offered)
        self._contents.drop_unused(kept.contents | _contents_of(self._ledger()))
        self.begin(kept)

    async def collect(self, keep: Kept) -> None:
        """Delete the replies, and then the records, of exchanges that no process of the program can repeat."""
        journal, thread = self._shared.journal, self._shared.journal_thread
        first = min([keep.first, *self.being_read.values()])
        rounds = None
        if first > self._dropped + 1:
            old = await on_thread(thread, partial(journal.exchanges, self._run_id, range(self._dropped + 1, first)))
            dead = frozenset(one.reply for each in old.values() for one in each.sent if one.reply is not None)
            live, rounds = _AllBut(dead), max(self._shared.keep_rounds, keep.num_exchanges - first + 1)
            await self._prune(Stay(since=keep.at - FOLLOWED_S, live=live))
            collect = self._contents.store.collect_garbage
            await on_thread(None, partial(collect, live, keep_versions=1, current=Version(0)))
        await self._prune(Stay(since=keep.at - FOLLOWED_S, rounds=rounds))  # they name the files, and go last
        self._dropped = max(self._dropped, first - 1)
