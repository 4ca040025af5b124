"""The events and effects of a run of messages, beyond those that it shares with a run of rounds. Pure values.

A message has a number in its run: 1, 2, 3, ... On the wire and in the events of clients it replaces a round's number,
and its reply an update. The process of the server program makes calls, which it numbers itself; the effect `Answer...`
with the number of a call makes the call return.
"""

from atoll.protocol.value_type import value
from atoll.protocol.vocabulary import ClientId, Digest, RoundId
from atoll.server.rounds import events as shared


@value
class Message:
    """Message of the server program to a node; its content is named by the digest of a manifest of pieces."""

    client_id: ClientId
    kind: str  # "train", "evaluate" or "query", or one of them with an action: "query.stats"
    content: Digest
    num_bytes: int
    group: str = ""
    ttl: float = 43200.0  # time within which a reply is useful [s]


# ---------------------------------------------------------------- events


@value
class ProgramStarted:
    """A process of the server program has started: it repeats all of its calls from the first one on."""


@value
class ExchangeAsked:
    """A call sends messages, whose contents are on disk.

    Attributes:
        call: the number of the call in the process.
        messages: at least one.
        timeout: time after which the call returns with the replies that are in [s]; None: the longest `ttl`.
        in_order: whether the main thread of the program makes the call: its position among such calls is then certain.
        is_waiting: whether the call returns with the replies; otherwise at once, and the replies are pulled.
    """

    call: int
    messages: tuple[Message, ...]
    timeout: float | None = None
    in_order: bool = True
    is_waiting: bool = True


@value
class RepliesPulled:
    """A call asks for new replies to these messages, which were not pulled before."""

    call: int
    numbers: tuple[RoundId, ...]


@value
class NodesAsked:
    """A call asks for the connected nodes.

    Attributes:
        call: the number of the call in the process.
        left_out: the number of preceding calls that were not events, because they got the same answer as the last one.
    """

    call: int
    left_out: int = 0


@value
class ProgramEnded:
    """The program's process has ended.

    Attributes:
        error: the last lines of its error; empty: its `main()` has returned, or it died.
        is_dead: whether it died before its `main()` returned or raised: killed, or out of memory.
    """

    error: str = ""
    is_dead: bool = False


Event = (
    ProgramStarted
    | ExchangeAsked
    | RepliesPulled
    | NodesAsked
    | ProgramEnded
    | shared.RunStarted
    | shared.CoordinatorStarted
    | shared.ClientJoined
    | shared.ClientDisconnected
    | shared.ClientLost
    | shared.ClientFailed
    | shared.UploadBegun
    | shared.UpdateReceived
    | shared.UpdateRefused
    | shared.FilesLost
    | shared.TimePassed
    | shared.PauseRequested
    | shared.StopRequested
    | shared.ResumeRequested
)


# ---------------------------------------------------------------- effects


@value
class StartProgram:
    """Start a process of the server program, after killing the previous one."""


@value
class Deliver:
    """Send a message to its node, which replies by `deadline`. Repeated when the node reconnects."""

    number: RoundId
    message: Message
    deadline: float
    counted: RoundId = RoundId(0)  # the node's newest message with an accepted reply; 0: none
    asked_at: float = 0.0  # the instant at which the message's exchange opened


@value
class AnswerMessages:
    """Effect: a call returns with the replies to these messages, in this order, or (pushed) only with their numbers."""

    call: int
    numbers: tuple[RoundId, ...]
    is_pushed: bool = False


@value
class AnswerNodes:
    """Effect: a call returns with these nodes, sorted."""

    call: int
    nodes: tuple[ClientId, ...]


@value
class RecordExchange:
    """Record an exchange that has opened, or write the record of a closed one: `ExchangeMachine.exchange`."""

    exchange: int


Effect = (
    StartProgram
    | Deliver
    | AnswerMessages
    | AnswerNodes
    | RecordExchange
    | shared.Release
    | shared.Accept
    | shared.Reject
    | shared.PauseRun
    | shared.EndRun
)
Effects = tuple[Effect, ...]
