"""The part of the exchange machine for the nodes: messages to them, replies from them. Pure."""

from atoll.protocol.vocabulary import TERMINAL, ClientId, Fate, RejectReason, ReleaseReason, RoundId
from atoll.server.exchanges.events import AnswerMessages, Deliver, Effect, Effects, RecordExchange
from atoll.server.exchanges.exchange import Exchange, Sent, Settled, end
from atoll.server.exchanges.ledger import Ledger
from atoll.server.exchanges.repetition import Repetition
from atoll.server.exchanges.rules import ExchangeRules
from atoll.server.rounds.events import (
    Accept,
    ClientDisconnected,
    ClientFailed,
    ClientJoined,
    ClientLost,
    Reject,
    Release,
    Update,
    UpdateReceived,
    UpdateRefused,
    UploadBegun,
)


class Deliveries:
    """Delivery of a run's messages to its nodes, one at a time to each node.

    Args:
        rules: the rules of each exchange.
        ledger: the state of the run, which this changes; None: a new run's.
    """

    def __init__(self, rules: ExchangeRules, ledger: Ledger | None = None) -> None:
        self.rules, self.ledger = rules, ledger or Ledger()
        self._closed: dict[int, Exchange] = {}  # by the last event

    @property
    def process(self) -> Repetition:
        """State of the calls of the program's current process."""
        return self.ledger.process

    def exchange(self, number: int) -> Exchange | None:
        """Return an exchange that is open, or that the last event has closed; None: only its record exists."""
        return self.ledger.open.get(number) or self._closed.get(number)

    # ------------------------------------------------------------ clients

    def _client_joined(self, event: ClientJoined, now: float) -> Effects:
        client_id = event.client_id
        node = self.ledger.membership.joined(event)
        unknown = (number for number in event.working_on if number not in node.queue)
        effects: list[Effect] = [Release(client_id, number, self._why_released()) for number in unknown]
        self._is_here(client_id, now)
        return (*effects, *self._deliver_next(client_id, now))

    def _is_here(self, client_id: ClientId, now: float) -> None:
        """Record that a node has connected since a restart of the coordinator, or will not."""
        if client_id in self.ledger.awaited:
            self.ledger.awaited.discard(client_id)
            if not self.ledger.awaited:
                self._all_are_here(now)

    def _all_are_here(self, now: float) -> None:
        """Extend the deadlines of messages by the time for which the run waited for its nodes."""
        self.ledger.awaited.clear()
        for exchange in self.ledger.open.values():
            exchange.extend(now - self._held_since(exchange), self.rules.outage_max)

    def _held_since(self, exchange: Exchange) -> float:
        return max(self.ledger.awaited_since, exchange.opened_at)

    def _why_released(self) -> ReleaseReason:
        return ReleaseReason.ROUND_CLOSED if self.ledger.is_open else ReleaseReason.RUN_ENDED

    def _client_disconnected(self, event: ClientDisconnected, now: float) -> Effects:
        self.ledger.membership.disconnected(event.client_id, event.session)
        return ()

    def _client_lost(self, event: ClientLost, now: float) -> Effects:
        self.ledger.membership.lost(event.client_id)
        self._is_here(event.client_id, now)
        node = self.ledger.membership.members.get(event.client_id)
        numbers = [] if node is None else [*node.queue]
        ended = (self._ended(number, Fate.LOST, event.reason, event.detail, now) for number in numbers)
        return tuple(effect for effects in ended for effect in effects)

    def _client_failed(self, event: ClientFailed, now: float) -> Effects:
        sent = self._waiting(event.client_id, event.round_id)
        return self._ended(sent.number, Fate.FAILED, event.reason, event.detail, now) if sent else ()

    def _upload_begun(self, event: UploadBegun, now: float) -> Effects:
        if (sent := self._waiting(event.client_id, event.round_id)) is not None:
            sent.has_begun = True
        return ()

    def _update_refused(self, event: UpdateRefused, now: float) -> Effects:
        sent = self._waiting(event.client_id, event.round_id)
        return self._ended(sent.number, Fate.REFUSED, event.reason, event.detail, now) if sent else ()

    def _update_received(self, event: UpdateReceived, now: float) -> Effects:
        update = event.update
        client_id, number, digest = update.client_id, update.round_id, update.digest
        if self.is_accepted(update):
            return (Accept(client_id, number, digest),)
        if (fault := self.refusal(update)) is not None:
            return (Reject(client_id, number, digest, *fault),)
        sent = self.ledger.sent(number)
        assert sent is not None
        sent.reply, sent.num_bytes = digest, update.num_bytes
        self.ledger.membership.members[client_id].counted = number
        return (Accept(client_id, number, digest), *self._ended(number, Fate.REPORTED, "", "", now))

    def is_accepted(self, update: Update) -> bool:
        """Return whether this reply was already accepted in an open exchange: only its answer was lost."""
        sent = self.ledger.sent(update.round_id)
        return sent is not None and sent.message.client_id == update.client_id and sent.reply == update.digest

    def refusal(self, update: Update) -> tuple[RejectReason, str] | None:
        """Return why a reply cannot count, before its bytes are sent; None: the bytes are wanted."""
        number, sent = update.round_id, self.ledger.sent(update.round_id)
        if self.ledger.state in TERMINAL:
            return RejectReason.RUN_ENDED, f"the run is {self.ledger.state}: {self.ledger.cause}"
        if sent is None and self.ledger.exchange_of(number):
            return RejectReason.TOO_LATE, f"message {number} has ended"
        if sent is None:
            return RejectReason.WRONG_ROUND, f"there is no message {number}"
        if sent.message.client_id != update.client_id:
            return RejectReason.NOT_INVITED, f"message {number} was not for {update.client_id}"
        if sent.reply is not None or sent.fate is Fate.REFUSED:
            return RejectReason.ALREADY_REPORTED, f"message {number} already has a different reply from you"
        if not sent.is_waiting:
            return RejectReason.TOO_LATE, f"message {number} has ended: {sent.fate}"
        return None

    def waits_for(self, client_id: ClientId, number: RoundId) -> bool:
        """Return whether a client's failure or reply to a message changes the state."""
        return self._waiting(client_id, number) is not None

    def _waiting(self, client_id: ClientId, number: RoundId) -> Sent | None:
        sent = self.ledger.sent(number)
        is_its = sent is not None and sent.is_waiting and sent.message.client_id == client_id
        return sent if is_its else None

    # ------------------------------------------------------------ messages

    def _ended(self, number: RoundId, fate: Fate, reason: str, detail: str, now: float) -> Effects:
        """End a message by its node, deliver the node's next one, and close the exchange if it was the last."""
        sent = self.ledger.sent(number)
        assert sent is not None
        end(sent, fate, now, str(reason), detail)
        effects = self._dequeue(sent, now)
        exchange = self.ledger.open[self.ledger.exchange_of(number)]
        return (*effects, *self._settle(exchange, now))

    def _take_back(self, sent: Sent, reason: ReleaseReason, now: float) -> Effects:
        """End a message without its node, release the node, and deliver its next message."""
        was_delivered = sent.delivered_at is not None
        release = (Release(sent.message.client_id, sent.number, reason),) if was_delivered else ()
        return (*release, *self._dequeue(sent, now))

    def _dequeue(self, sent: Sent, now: float) -> Effects:
        queue = self.ledger.membership.members[sent.message.client_id].queue
        was_first = queue[0] == sent.number
        queue.remove(sent.number)
        return self._deliver_next(sent.message.client_id, now) if was_first else ()

    def _deliver_next(self, client_id: ClientId, now: float) -> Effects:
        """Deliver the first message of a connected node, again if it has reconnected."""
        node = self.ledger.membership.members[client_id]
        if node.session is None or not node.queue or not self.ledger.is_open:
            return ()
        sent = self.ledger.sent(node.queue[0])
        assert sent is not None
        sent.delivered_at = now if sent.delivered_at is None else sent.delivered_at
        exchange = self.ledger.open[self.ledger.exchange_of(sent.number)]
        held = now - self._held_since(exchange) if self.ledger.awaited else 0.0
        return (Deliver(sent.number, sent.message, sent.deadline + held, node.counted, exchange.opened_at),)

    def _settle(self, exchange: Exchange, now: float) -> Effects:
        """Close an exchange if it can close, and let the call that waits for it return."""
        if not exchange.settle(now, self.rules.linger):
            return ()
        ledger, number = self.ledger, exchange.number
        self._closed[number] = ledger.open.pop(number)
        if not exchange.is_void:
            ledger.settled[number] = Settled.of(exchange)
        effects: list[Effect] = [RecordExchange(number)]
        if (call := self.process.waiting.pop(number, None)) is not None:
            effects.append(AnswerMessages(call, exchange.answered))
        return tuple(effects)
