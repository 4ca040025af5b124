from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClientMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "failed", "evaluated", "goodbye", "ready", "give_statistics", "secure_keys", "secure_shares", "secure_agree", "secure_reveal", "secure_gone", "secure_masked")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    GIVE_STATISTICS_FIELD_NUMBER: _ClassVar[int]
    SECURE_KEYS_FIELD_NUMBER: _ClassVar[int]
    SECURE_SHARES_FIELD_NUMBER: _ClassVar[int]
    SECURE_AGREE_FIELD_NUMBER: _ClassVar[int]
    SECURE_REVEAL_FIELD_NUMBER: _ClassVar[int]
    SECURE_GONE_FIELD_NUMBER: _ClassVar[int]
    SECURE_MASKED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    failed: Failed
    evaluated: Evaluated
    goodbye: Goodbye
    ready: Ready
    give_statistics: GiveStatistics
    secure_keys: SecureKeys
    secure_shares: SecureShares
    secure_agree: SecureAgree
    secure_reveal: SecureReveal
    secure_gone: SecureGone
    secure_masked: SecureMasked
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., evaluated: _Optional[_Union[Evaluated, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., give_statistics: _Optional[_Union[GiveStatistics, _Mapping]] = ..., secure_keys: _Optional[_Union[SecureKeys, _Mapping]] = ..., secure_shares: _Optional[_Union[SecureShares, _Mapping]] = ..., secure_agree: _Optional[_Union[SecureAgree, _Mapping]] = ..., secure_reveal: _Optional[_Union[SecureReveal, _Mapping]] = ..., secure_gone: _Optional[_Union[SecureGone, _Mapping]] = ..., secure_masked: _Optional[_Union[SecureMasked, _Mapping]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("welcome", "invite", "release", "evaluate", "run_ended", "ranks", "ask_statistics", "notice", "secure_roster", "secure_boxes", "secure_survivors", "secure_opening", "signature")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    INVITE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    RUN_ENDED_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ASK_STATISTICS_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    SECURE_ROSTER_FIELD_NUMBER: _ClassVar[int]
    SECURE_BOXES_FIELD_NUMBER: _ClassVar[int]
    SECURE_SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    SECURE_OPENING_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    invite: Invite
    release: Release
    evaluate: Evaluate
    run_ended: RunEnded
    ranks: Ranks
    ask_statistics: AskStatistics
    notice: Notice
    secure_roster: SecureRoster
    secure_boxes: SecureBoxes
    secure_survivors: SecureSurvivors
    secure_opening: SecureOpening
    signature: Signature
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., invite: _Optional[_Union[Invite, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., evaluate: _Optional[_Union[Evaluate, _Mapping]] = ..., run_ended: _Optional[_Union[RunEnded, _Mapping]] = ..., ranks: _Optional[_Union[Ranks, _Mapping]] = ..., ask_statistics: _Optional[_Union[AskStatistics, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., secure_roster: _Optional[_Union[SecureRoster, _Mapping]] = ..., secure_boxes: _Optional[_Union[SecureBoxes, _Mapping]] = ..., secure_survivors: _Optional[_Union[SecureSurvivors, _Mapping]] = ..., secure_opening: _Optional[_Union[SecureOpening, _Mapping]] = ..., signature: _Optional[_Union[Signature, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "client_id", "session", "tasks", "num_examples", "label", "working_on", "software", "codecs", "process", "folder", "gives_statistics", "spreads_parts", "takes_messages", "clock", "takes_notices", "joins_sessions")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    WORKING_ON_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    GIVES_STATISTICS_FIELD_NUMBER: _ClassVar[int]
    SPREADS_PARTS_FIELD_NUMBER: _ClassVar[int]
    TAKES_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    TAKES_NOTICES_FIELD_NUMBER: _ClassVar[int]
    JOINS_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    client_id: str
    session: str
    tasks: _containers.RepeatedScalarFieldContainer[str]
    num_examples: int
    label: str
    working_on: _containers.RepeatedCompositeFieldContainer[Work]
    software: str
    codecs: _containers.RepeatedScalarFieldContainer[str]
    process: str
    folder: str
    gives_statistics: bool
    spreads_parts: bool
    takes_messages: bool
    clock: float
    takes_notices: bool
    joins_sessions: bool
    def __init__(self, protocol: _Optional[int] = ..., client_id: _Optional[str] = ..., session: _Optional[str] = ..., tasks: _Optional[_Iterable[str]] = ..., num_examples: _Optional[int] = ..., label: _Optional[str] = ..., working_on: _Optional[_Iterable[_Union[Work, _Mapping]]] = ..., software: _Optional[str] = ..., codecs: _Optional[_Iterable[str]] = ..., process: _Optional[str] = ..., folder: _Optional[str] = ..., gives_statistics: bool = ..., spreads_parts: bool = ..., takes_messages: bool = ..., clock: _Optional[float] = ..., takes_notices: bool = ..., joins_sessions: bool = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("run_id", "round_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round_id: int
    def __init__(self, run_id: _Optional[str] = ..., round_id: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("clock",)
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    clock: float
    def __init__(self, clock: _Optional[float] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("run_id", "round_id", "reason", "detail", "waits")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round_id: int
    reason: str
    detail: str
    waits: bool
    def __init__(self, run_id: _Optional[str] = ..., round_id: _Optional[int] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., waits: bool = ...) -> None: ...

class Evaluated(_message.Message):
    __slots__ = ("run_id", "version", "statistics", "error", "reason", "metrics", "min_sites")
    class StatisticsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Statistics
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Statistics, _Mapping]] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    MIN_SITES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: int
    statistics: _containers.MessageMap[str, Statistics]
    error: str
    reason: str
    metrics: str
    min_sites: int
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[int] = ..., statistics: _Optional[_Mapping[str, Statistics]] = ..., error: _Optional[str] = ..., reason: _Optional[str] = ..., metrics: _Optional[str] = ..., min_sites: _Optional[int] = ...) -> None: ...

class Statistics(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class AskStatistics(_message.Message):
    __slots__ = ("run_id", "number", "task", "time_left_s", "local", "model_seed", "secure", "question")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    MODEL_SEED_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    number: int
    task: str
    time_left_s: float
    local: str
    model_seed: int
    secure: SecureTerms
    question: str
    def __init__(self, run_id: _Optional[str] = ..., number: _Optional[int] = ..., task: _Optional[str] = ..., time_left_s: _Optional[float] = ..., local: _Optional[str] = ..., model_seed: _Optional[int] = ..., secure: _Optional[_Union[SecureTerms, _Mapping]] = ..., question: _Optional[str] = ...) -> None: ...

class GiveStatistics(_message.Message):
    __slots__ = ("run_id", "number", "statistics", "error", "reason", "leave", "min_sites")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    MIN_SITES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    number: int
    statistics: bytes
    error: str
    reason: str
    leave: str
    min_sites: int
    def __init__(self, run_id: _Optional[str] = ..., number: _Optional[int] = ..., statistics: _Optional[bytes] = ..., error: _Optional[str] = ..., reason: _Optional[str] = ..., leave: _Optional[str] = ..., min_sites: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("heartbeat_s", "lease_s", "tasks", "ranks", "audit_checkpoint", "publisher")
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    PUBLISHER_FIELD_NUMBER: _ClassVar[int]
    heartbeat_s: float
    lease_s: float
    tasks: _containers.RepeatedScalarFieldContainer[str]
    ranks: Ranks
    audit_checkpoint: str
    publisher: Publisher
    def __init__(self, heartbeat_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., tasks: _Optional[_Iterable[str]] = ..., ranks: _Optional[_Union[Ranks, _Mapping]] = ..., audit_checkpoint: _Optional[str] = ..., publisher: _Optional[_Union[Publisher, _Mapping]] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class Signature(_message.Message):
    __slots__ = ("issued_us", "ed25519")
    ISSUED_US_FIELD_NUMBER: _ClassVar[int]
    ED25519_FIELD_NUMBER: _ClassVar[int]
    issued_us: int
    ed25519: bytes
    def __init__(self, issued_us: _Optional[int] = ..., ed25519: _Optional[bytes] = ...) -> None: ...

class Publisher(_message.Message):
    __slots__ = ("key", "issued_us", "expires_us", "certificate", "signature")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ISSUED_US_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_US_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    issued_us: int
    expires_us: int
    certificate: bytes
    signature: bytes
    def __init__(self, key: _Optional[bytes] = ..., issued_us: _Optional[int] = ..., expires_us: _Optional[int] = ..., certificate: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Ranks(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Invite(_message.Message):
    __slots__ = ("run_id", "round_id", "task", "base_version", "model_digest", "time_left_s", "seed", "local", "grace_s", "manifest", "data", "algorithm", "codec", "counted_round", "model_seed", "rank", "audit_checkpoint", "spreads", "message", "group", "run_number", "asked_at", "secure")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    COUNTED_ROUND_FIELD_NUMBER: _ClassVar[int]
    MODEL_SEED_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    AUDIT_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SPREADS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RUN_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ASKED_AT_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round_id: int
    task: str
    base_version: int
    model_digest: str
    time_left_s: float
    seed: int
    local: str
    grace_s: float
    manifest: bytes
    data: bytes
    algorithm: str
    codec: str
    counted_round: int
    model_seed: int
    rank: int
    audit_checkpoint: str
    spreads: bool
    message: str
    group: str
    run_number: int
    asked_at: float
    secure: SecureTerms
    def __init__(self, run_id: _Optional[str] = ..., round_id: _Optional[int] = ..., task: _Optional[str] = ..., base_version: _Optional[int] = ..., model_digest: _Optional[str] = ..., time_left_s: _Optional[float] = ..., seed: _Optional[int] = ..., local: _Optional[str] = ..., grace_s: _Optional[float] = ..., manifest: _Optional[bytes] = ..., data: _Optional[bytes] = ..., algorithm: _Optional[str] = ..., codec: _Optional[str] = ..., counted_round: _Optional[int] = ..., model_seed: _Optional[int] = ..., rank: _Optional[int] = ..., audit_checkpoint: _Optional[str] = ..., spreads: bool = ..., message: _Optional[str] = ..., group: _Optional[str] = ..., run_number: _Optional[int] = ..., asked_at: _Optional[float] = ..., secure: _Optional[_Union[SecureTerms, _Mapping]] = ...) -> None: ...

class SecureTerms(_message.Message):
    __slots__ = ("terms", "ranges")
    TERMS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    terms: bytes
    ranges: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, terms: _Optional[bytes] = ..., ranges: _Optional[_Iterable[int]] = ...) -> None: ...

class SecureSession(_message.Message):
    __slots__ = ("run_id", "round_id", "attempt", "session", "purpose")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round_id: int
    attempt: int
    session: int
    purpose: str
    def __init__(self, run_id: _Optional[str] = ..., round_id: _Optional[int] = ..., attempt: _Optional[int] = ..., session: _Optional[int] = ..., purpose: _Optional[str] = ...) -> None: ...

class SecureKeys(_message.Message):
    __slots__ = ("of", "keys")
    OF_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    of: SecureSession
    keys: MemberKeys
    def __init__(self, of: _Optional[_Union[SecureSession, _Mapping]] = ..., keys: _Optional[_Union[MemberKeys, _Mapping]] = ...) -> None: ...

class MemberKeys(_message.Message):
    __slots__ = ("name", "terms", "mask_key", "box_key", "commitment", "chain_count", "chain_hash", "site_key", "certificate", "certification", "signature")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    MASK_KEY_FIELD_NUMBER: _ClassVar[int]
    BOX_KEY_FIELD_NUMBER: _ClassVar[int]
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    CHAIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    SITE_KEY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATION_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    terms: bytes
    mask_key: bytes
    box_key: bytes
    commitment: bytes
    chain_count: int
    chain_hash: bytes
    site_key: bytes
    certificate: bytes
    certification: bytes
    signature: bytes
    def __init__(self, name: _Optional[str] = ..., terms: _Optional[bytes] = ..., mask_key: _Optional[bytes] = ..., box_key: _Optional[bytes] = ..., commitment: _Optional[bytes] = ..., chain_count: _Optional[int] = ..., chain_hash: _Optional[bytes] = ..., site_key: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., certification: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class SecureRoster(_message.Message):
    __slots__ = ("of", "threshold", "members")
    OF_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    of: SecureSession
    threshold: int
    members: _containers.RepeatedCompositeFieldContainer[MemberKeys]
    def __init__(self, of: _Optional[_Union[SecureSession, _Mapping]] = ..., threshold: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MemberKeys, _Mapping]]] = ...) -> None: ...

class SecureBox(_message.Message):
    __slots__ = ("position", "box")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BOX_FIELD_NUMBER: _ClassVar[int]
    position: int
    box: bytes
    def __init__(self, position: _Optional[int] = ..., box: _Optional[bytes] = ...) -> None: ...

class SecureShares(_message.Message):
    __slots__ = ("of", "boxes")
    OF_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    of: SecureSession
    boxes: _containers.RepeatedCompositeFieldContainer[SecureBox]
    def __init__(self, of: _Optional[_Union[SecureSession, _Mapping]] = ..., boxes: _Optional[_Iterable[_Union[SecureBox, _Mapping]]] = ...) -> None: ...

class SecureBoxes(_message.Message):
    __slots__ = ("of", "boxes")
    OF_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    of: SecureSession
    boxes: _containers.RepeatedCompositeFieldContainer[SecureBox]
    def __init__(self, of: _Optional[_Union[SecureSession, _Mapping]] = ..., boxes: _Optional[_Iterable[_Union[SecureBox, _Mapping]]] = ...) -> None: ...

class SecureMasked(_message.Message):
    __slots__ = ("of", "words")
    OF_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    of: SecureSession
    words: bytes
    def __init__(self, of: _Optional[_Union[SecureSession, _Mapping]] = ..., words: _Optional[bytes] = ...) -> None: ...

class SecureSurvivors(_message.Message):
    __slots__ = ("of", "members")
    OF_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    of: SecureSession
    members: bytes
    def __init__(self, of: _Optional[_Union[SecureSession, _Mapping]] = ..., members: _Optional[bytes] = ...) -> None: ...

class SecureAgree(_message.Message):
    __slots__ = ("of", "signature")
    OF_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    of: SecureSession
    signature: bytes
    def __init__(self, of: _Optional[_Union[SecureSession, _Mapping]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class SecureSigned(_message.Message):
    __slots__ = ("position", "signature")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    position: int
    signature: bytes
    def __init__(self, position: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class SecureOpening(_message.Message):
    __slots__ = ("of", "signed")
    OF_FIELD_NUMBER: _ClassVar[int]
    SIGNED_FIELD_NUMBER: _ClassVar[int]
    of: SecureSession
    signed: _containers.RepeatedCompositeFieldContainer[SecureSigned]
    def __init__(self, of: _Optional[_Union[SecureSession, _Mapping]] = ..., signed: _Optional[_Iterable[_Union[SecureSigned, _Mapping]]] = ...) -> None: ...

class SecureReveal(_message.Message):
    __slots__ = ("of", "shares")
    OF_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    of: SecureSession
    shares: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, of: _Optional[_Union[SecureSession, _Mapping]] = ..., shares: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SecureGone(_message.Message):
    __slots__ = ("of", "reason", "detail", "refused")
    OF_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    of: SecureSession
    reason: str
    detail: str
    refused: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, of: _Optional[_Union[SecureSession, _Mapping]] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., refused: _Optional[_Iterable[str]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("run_id", "round_id", "reason", "submit")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round_id: int
    reason: str
    submit: bool
    def __init__(self, run_id: _Optional[str] = ..., round_id: _Optional[int] = ..., reason: _Optional[str] = ..., submit: bool = ...) -> None: ...

class Evaluate(_message.Message):
    __slots__ = ("run_id", "task", "version", "model_digest", "time_left_s", "manifest", "local", "counted_round", "model_seed", "run_number", "asked_at", "secure")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    COUNTED_ROUND_FIELD_NUMBER: _ClassVar[int]
    MODEL_SEED_FIELD_NUMBER: _ClassVar[int]
    RUN_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ASKED_AT_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    task: str
    version: int
    model_digest: str
    time_left_s: float
    manifest: bytes
    local: str
    counted_round: int
    model_seed: int
    run_number: int
    asked_at: float
    secure: SecureTerms
    def __init__(self, run_id: _Optional[str] = ..., task: _Optional[str] = ..., version: _Optional[int] = ..., model_digest: _Optional[str] = ..., time_left_s: _Optional[float] = ..., manifest: _Optional[bytes] = ..., local: _Optional[str] = ..., counted_round: _Optional[int] = ..., model_seed: _Optional[int] = ..., run_number: _Optional[int] = ..., asked_at: _Optional[float] = ..., secure: _Optional[_Union[SecureTerms, _Mapping]] = ...) -> None: ...

class RunEnded(_message.Message):
    __slots__ = ("run_id", "state", "cause", "num_open")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: str
    cause: str
    num_open: int
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[str] = ..., cause: _Optional[str] = ..., num_open: _Optional[int] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ("run_id", "digest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    digest: str
    def __init__(self, run_id: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class ManifestReply(_message.Message):
    __slots__ = ("manifest", "version")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    version: int
    def __init__(self, manifest: _Optional[bytes] = ..., version: _Optional[int] = ...) -> None: ...

class Box(_message.Message):
    __slots__ = ("tensor", "offsets", "lengths")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    tensor: str
    offsets: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tensor: _Optional[str] = ..., offsets: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("open", "credit")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    open: DownloadOpen
    credit: int
    def __init__(self, open: _Optional[_Union[DownloadOpen, _Mapping]] = ..., credit: _Optional[int] = ...) -> None: ...

class DownloadOpen(_message.Message):
    __slots__ = ("run_id", "digest", "boxes", "position", "credit")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    digest: str
    boxes: _containers.RepeatedCompositeFieldContainer[Box]
    position: int
    credit: int
    def __init__(self, run_id: _Optional[str] = ..., digest: _Optional[str] = ..., boxes: _Optional[_Iterable[_Union[Box, _Mapping]]] = ..., position: _Optional[int] = ..., credit: _Optional[int] = ...) -> None: ...

class DownloadReply(_message.Message):
    __slots__ = ("total_bytes", "data", "sha256")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    data: bytes
    sha256: bytes
    def __init__(self, total_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class UploadRequest(_message.Message):
    __slots__ = ("open", "chunk")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    open: UploadOpen
    chunk: Chunk
    def __init__(self, open: _Optional[_Union[UploadOpen, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class UploadOpen(_message.Message):
    __slots__ = ("manifest", "statistics", "download_seconds", "train_seconds", "data", "metrics", "min_sites", "part", "mesh", "steps")
    class StatisticsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Statistics
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Statistics, _Mapping]] = ...) -> None: ...
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    MIN_SITES_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    statistics: _containers.MessageMap[str, Statistics]
    download_seconds: float
    train_seconds: float
    data: bytes
    metrics: str
    min_sites: int
    part: bytes
    mesh: MeshUse
    steps: int
    def __init__(self, manifest: _Optional[bytes] = ..., statistics: _Optional[_Mapping[str, Statistics]] = ..., download_seconds: _Optional[float] = ..., train_seconds: _Optional[float] = ..., data: _Optional[bytes] = ..., metrics: _Optional[str] = ..., min_sites: _Optional[int] = ..., part: _Optional[bytes] = ..., mesh: _Optional[_Union[MeshUse, _Mapping]] = ..., steps: _Optional[int] = ...) -> None: ...

class MeshUse(_message.Message):
    __slots__ = ("num_ranks", "peak_bytes", "steps_per_s", "flops_per_s", "peak_flops")
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PEAK_FLOPS_FIELD_NUMBER: _ClassVar[int]
    num_ranks: int
    peak_bytes: int
    steps_per_s: float
    flops_per_s: float
    peak_flops: float
    def __init__(self, num_ranks: _Optional[int] = ..., peak_bytes: _Optional[int] = ..., steps_per_s: _Optional[float] = ..., flops_per_s: _Optional[float] = ..., peak_flops: _Optional[float] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("position", "data")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    position: int
    data: bytes
    def __init__(self, position: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("position", "verdict", "kept", "window")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    position: int
    verdict: Verdict
    kept: bool
    window: int
    def __init__(self, position: _Optional[int] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., kept: bool = ..., window: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("accepted", "reason", "detail", "resend")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RESEND_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    detail: str
    resend: bool
    def __init__(self, accepted: bool = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., resend: bool = ...) -> None: ...

class RankMessage(_message.Message):
    __slots__ = ("hello", "status", "folded", "fold_failed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FOLDED_FIELD_NUMBER: _ClassVar[int]
    FOLD_FAILED_FIELD_NUMBER: _ClassVar[int]
    hello: RankHello
    status: RankStatus
    folded: Folded
    fold_failed: FoldFailed
    def __init__(self, hello: _Optional[_Union[RankHello, _Mapping]] = ..., status: _Optional[_Union[RankStatus, _Mapping]] = ..., folded: _Optional[_Union[Folded, _Mapping]] = ..., fold_failed: _Optional[_Union[FoldFailed, _Mapping]] = ...) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("protocol", "rank", "num_ranks", "address", "store_address", "software", "process", "folder", "codecs")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    rank: int
    num_ranks: int
    address: str
    store_address: str
    software: str
    process: str
    folder: str
    codecs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol: _Optional[int] = ..., rank: _Optional[int] = ..., num_ranks: _Optional[int] = ..., address: _Optional[str] = ..., store_address: _Optional[str] = ..., software: _Optional[str] = ..., process: _Optional[str] = ..., folder: _Optional[str] = ..., codecs: _Optional[_Iterable[str]] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("received_bytes", "sent_bytes", "exchanged_bytes", "store_address", "arrivals", "shortages", "certificate_until")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXCHANGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ARRIVALS_FIELD_NUMBER: _ClassVar[int]
    SHORTAGES_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    sent_bytes: int
    exchanged_bytes: int
    store_address: str
    arrivals: _containers.RepeatedCompositeFieldContainer[Arrival]
    shortages: _containers.RepeatedCompositeFieldContainer[Shortage]
    certificate_until: float
    def __init__(self, received_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., exchanged_bytes: _Optional[int] = ..., store_address: _Optional[str] = ..., arrivals: _Optional[_Iterable[_Union[Arrival, _Mapping]]] = ..., shortages: _Optional[_Iterable[_Union[Shortage, _Mapping]]] = ..., certificate_until: _Optional[float] = ...) -> None: ...

class Shortage(_message.Message):
    __slots__ = ("run_id", "detail")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    detail: str
    def __init__(self, run_id: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Arrival(_message.Message):
    __slots__ = ("client_id", "run_id", "round_id", "digest", "num_bytes", "total_bytes")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    run_id: str
    round_id: int
    digest: str
    num_bytes: int
    total_bytes: int
    def __init__(self, client_id: _Optional[str] = ..., run_id: _Optional[str] = ..., round_id: _Optional[int] = ..., digest: _Optional[str] = ..., num_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class RankOrder(_message.Message):
    __slots__ = ("welcome", "fold", "collect", "plan_part", "break_off")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FOLD_FIELD_NUMBER: _ClassVar[int]
    COLLECT_FIELD_NUMBER: _ClassVar[int]
    PLAN_PART_FIELD_NUMBER: _ClassVar[int]
    BREAK_OFF_FIELD_NUMBER: _ClassVar[int]
    welcome: RankWelcome
    fold: Fold
    collect: Collect
    plan_part: bytes
    break_off: int
    def __init__(self, welcome: _Optional[_Union[RankWelcome, _Mapping]] = ..., fold: _Optional[_Union[Fold, _Mapping]] = ..., collect: _Optional[_Union[Collect, _Mapping]] = ..., plan_part: _Optional[bytes] = ..., break_off: _Optional[int] = ...) -> None: ...

class RankWelcome(_message.Message):
    __slots__ = ("status_s",)
    STATUS_S_FIELD_NUMBER: _ClassVar[int]
    status_s: float
    def __init__(self, status_s: _Optional[float] = ...) -> None: ...

class Fold(_message.Message):
    __slots__ = ("run_id", "round_id", "attempt", "store_address", "plan", "run_number")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    RUN_NUMBER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round_id: int
    attempt: int
    store_address: str
    plan: bytes
    run_number: int
    def __init__(self, run_id: _Optional[str] = ..., round_id: _Optional[int] = ..., attempt: _Optional[int] = ..., store_address: _Optional[str] = ..., plan: _Optional[bytes] = ..., run_number: _Optional[int] = ...) -> None: ...

class Folded(_message.Message):
    __slots__ = ("run_id", "attempt", "sha256", "seconds", "exchanged_bytes", "outcome")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    attempt: int
    sha256: _containers.RepeatedScalarFieldContainer[bytes]
    seconds: float
    exchanged_bytes: int
    outcome: bytes
    def __init__(self, run_id: _Optional[str] = ..., attempt: _Optional[int] = ..., sha256: _Optional[_Iterable[bytes]] = ..., seconds: _Optional[float] = ..., exchanged_bytes: _Optional[int] = ..., outcome: _Optional[bytes] = ...) -> None: ...

class FoldFailed(_message.Message):
    __slots__ = ("run_id", "attempt", "detail", "again", "damaged", "dropped")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    attempt: int
    detail: str
    again: bool
    damaged: bytes
    dropped: _containers.ScalarMap[int, str]
    def __init__(self, run_id: _Optional[str] = ..., attempt: _Optional[int] = ..., detail: _Optional[str] = ..., again: bool = ..., damaged: _Optional[bytes] = ..., dropped: _Optional[_Mapping[int, str]] = ...) -> None: ...

class Collect(_message.Message):
    __slots__ = ("run_id", "current", "keep_versions", "pinned", "is_over", "oldest_base")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    KEEP_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    OLDEST_BASE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    current: int
    keep_versions: int
    pinned: _containers.RepeatedScalarFieldContainer[int]
    is_over: bool
    oldest_base: int
    def __init__(self, run_id: _Optional[str] = ..., current: _Optional[int] = ..., keep_versions: _Optional[int] = ..., pinned: _Optional[_Iterable[int]] = ..., is_over: bool = ..., oldest_base: _Optional[int] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("callers",)
    CALLERS_FIELD_NUMBER: _ClassVar[int]
    callers: _containers.RepeatedCompositeFieldContainer[Caller]
    def __init__(self, callers: _Optional[_Iterable[_Union[Caller, _Mapping]]] = ...) -> None: ...

class Caller(_message.Message):
    __slots__ = ("role", "name", "serial", "run_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    serial: bytes
    run_id: str
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., serial: _Optional[bytes] = ..., run_id: _Optional[str] = ...) -> None: ...

class AdmitReply(_message.Message):
    __slots__ = ("refusals",)
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    def __init__(self, refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("detail", "is_revoked")
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    IS_REVOKED_FIELD_NUMBER: _ClassVar[int]
    detail: str
    is_revoked: bool
    def __init__(self, detail: _Optional[str] = ..., is_revoked: bool = ...) -> None: ...

class OpenedUpdate(_message.Message):
    __slots__ = ("verdict", "kept", "has_words")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    HAS_WORDS_FIELD_NUMBER: _ClassVar[int]
    verdict: Verdict
    kept: bool
    has_words: bool
    def __init__(self, verdict: _Optional[_Union[Verdict, _Mapping]] = ..., kept: bool = ..., has_words: bool = ...) -> None: ...

class SubmittedUpdate(_message.Message):
    __slots__ = ("opened", "rank", "meta", "reason", "detail")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    META_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    opened: UploadOpen
    rank: int
    meta: bytes
    reason: str
    detail: str
    def __init__(self, opened: _Optional[_Union[UploadOpen, _Mapping]] = ..., rank: _Optional[int] = ..., meta: _Optional[bytes] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class UpdatesRequest(_message.Message):
    __slots__ = ("run_id", "digests", "rank", "withdraws")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    rank: int
    withdraws: bool
    def __init__(self, run_id: _Optional[str] = ..., digests: _Optional[_Iterable[bytes]] = ..., rank: _Optional[int] = ..., withdraws: bool = ...) -> None: ...

class AcceptedUpdate(_message.Message):
    __slots__ = ("digest", "meta")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    META_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    meta: bytes
    def __init__(self, digest: _Optional[bytes] = ..., meta: _Optional[bytes] = ...) -> None: ...

class UnusedUpdates(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StartRunRequest(_message.Message):
    __slots__ = ("config_toml", "overrides")
    CONFIG_TOML_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    config_toml: str
    overrides: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, config_toml: _Optional[str] = ..., overrides: _Optional[_Iterable[str]] = ...) -> None: ...

class CollectStatisticsRequest(_message.Message):
    __slots__ = ("config_toml", "overrides", "deadline_s", "on_behalf_of")
    CONFIG_TOML_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    ON_BEHALF_OF_FIELD_NUMBER: _ClassVar[int]
    config_toml: str
    overrides: _containers.RepeatedScalarFieldContainer[str]
    deadline_s: float
    on_behalf_of: str
    def __init__(self, config_toml: _Optional[str] = ..., overrides: _Optional[_Iterable[str]] = ..., deadline_s: _Optional[float] = ..., on_behalf_of: _Optional[str] = ...) -> None: ...

class CollectStatisticsReply(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class StopRunRequest(_message.Message):
    __slots__ = ("run_id", "reason", "on_behalf_of")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ON_BEHALF_OF_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    reason: str
    on_behalf_of: str
    def __init__(self, run_id: _Optional[str] = ..., reason: _Optional[str] = ..., on_behalf_of: _Optional[str] = ...) -> None: ...

class PauseRunRequest(_message.Message):
    __slots__ = ("run_id", "reason", "on_behalf_of")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ON_BEHALF_OF_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    reason: str
    on_behalf_of: str
    def __init__(self, run_id: _Optional[str] = ..., reason: _Optional[str] = ..., on_behalf_of: _Optional[str] = ...) -> None: ...

class DeleteRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ResumeRunRequest(_message.Message):
    __slots__ = ("run_id", "overrides", "on_behalf_of")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    ON_BEHALF_OF_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    overrides: _containers.RepeatedScalarFieldContainer[str]
    on_behalf_of: str
    def __init__(self, run_id: _Optional[str] = ..., overrides: _Optional[_Iterable[str]] = ..., on_behalf_of: _Optional[str] = ...) -> None: ...

class ListRanksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRanksReply(_message.Message):
    __slots__ = ("ranks", "received_bytes")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankRow]
    received_bytes: int
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankRow, _Mapping]]] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class RankRow(_message.Message):
    __slots__ = ("rank", "address", "received_bytes", "sent_bytes", "exchanged_bytes", "conflict", "certificate_until")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXCHANGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONFLICT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    rank: int
    address: str
    received_bytes: int
    sent_bytes: int
    exchanged_bytes: int
    conflict: str
    certificate_until: float
    def __init__(self, rank: _Optional[int] = ..., address: _Optional[str] = ..., received_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., exchanged_bytes: _Optional[int] = ..., conflict: _Optional[str] = ..., certificate_until: _Optional[float] = ...) -> None: ...

class RunReply(_message.Message):
    __slots__ = ("run_id", "state", "message")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: str
    message: str
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class InviteRequest(_message.Message):
    __slots__ = ("role", "name", "lifetime_s", "on_behalf_of")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_S_FIELD_NUMBER: _ClassVar[int]
    ON_BEHALF_OF_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    lifetime_s: float
    on_behalf_of: str
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., lifetime_s: _Optional[float] = ..., on_behalf_of: _Optional[str] = ...) -> None: ...

class InviteReply(_message.Message):
    __slots__ = ("join_code", "expires_at")
    JOIN_CODE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    join_code: str
    expires_at: float
    def __init__(self, join_code: _Optional[str] = ..., expires_at: _Optional[float] = ...) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("role", "name", "on_behalf_of")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ON_BEHALF_OF_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    on_behalf_of: str
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., on_behalf_of: _Optional[str] = ...) -> None: ...

class RevokeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListMembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListMembersReply(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[MemberRow]
    def __init__(self, members: _Optional[_Iterable[_Union[MemberRow, _Mapping]]] = ...) -> None: ...

class MemberRow(_message.Message):
    __slots__ = ("role", "name", "standing", "since", "expires_at")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    standing: str
    since: float
    expires_at: float
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., standing: _Optional[str] = ..., since: _Optional[float] = ..., expires_at: _Optional[float] = ...) -> None: ...

class LookRequest(_message.Message):
    __slots__ = ("view", "run_id", "number", "count", "after", "last", "state", "fate", "client", "text", "prefix", "whole", "bare")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    BARE_FIELD_NUMBER: _ClassVar[int]
    view: str
    run_id: str
    number: int
    count: int
    after: str
    last: bool
    state: str
    fate: str
    client: str
    text: str
    prefix: str
    whole: bool
    bare: bool
    def __init__(self, view: _Optional[str] = ..., run_id: _Optional[str] = ..., number: _Optional[int] = ..., count: _Optional[int] = ..., after: _Optional[str] = ..., last: bool = ..., state: _Optional[str] = ..., fate: _Optional[str] = ..., client: _Optional[str] = ..., text: _Optional[str] = ..., prefix: _Optional[str] = ..., whole: bool = ..., bare: bool = ...) -> None: ...

class LookReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("run_id", "after")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    after: int
    def __init__(self, run_id: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: bytes
    def __init__(self, lines: _Optional[bytes] = ...) -> None: ...

class ReadAuditLogRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditLogPart(_message.Message):
    __slots__ = ("file", "data")
    FILE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file: str
    data: bytes
    def __init__(self, file: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetAuthorityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuthorityReply(_message.Message):
    __slots__ = ("ca_pem", "cross_pem")
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    CROSS_PEM_FIELD_NUMBER: _ClassVar[int]
    ca_pem: bytes
    cross_pem: bytes
    def __init__(self, ca_pem: _Optional[bytes] = ..., cross_pem: _Optional[bytes] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("id", "secret", "request", "roles", "name")
    ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    secret: bytes
    request: bytes
    roles: _containers.RepeatedScalarFieldContainer[str]
    name: str
    def __init__(self, id: _Optional[bytes] = ..., secret: _Optional[bytes] = ..., request: _Optional[bytes] = ..., roles: _Optional[_Iterable[str]] = ..., name: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("request", "signature")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    signature: bytes
    def __init__(self, request: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("certificate_pem", "ca_pem", "address", "admin_address", "cross_pem")
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CROSS_PEM_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    ca_pem: bytes
    address: str
    admin_address: str
    cross_pem: bytes
    def __init__(self, certificate_pem: _Optional[bytes] = ..., ca_pem: _Optional[bytes] = ..., address: _Optional[str] = ..., admin_address: _Optional[str] = ..., cross_pem: _Optional[bytes] = ...) -> None: ...

class SignOrder(_message.Message):
    __slots__ = ("number", "request", "role", "name", "older_certificate_pem", "consent")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OLDER_CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    CONSENT_FIELD_NUMBER: _ClassVar[int]
    number: int
    request: bytes
    role: str
    name: str
    older_certificate_pem: bytes
    consent: bytes
    def __init__(self, number: _Optional[int] = ..., request: _Optional[bytes] = ..., role: _Optional[str] = ..., name: _Optional[str] = ..., older_certificate_pem: _Optional[bytes] = ..., consent: _Optional[bytes] = ...) -> None: ...

class SignAnswer(_message.Message):
    __slots__ = ("number", "certificate_pem", "refusal", "ca_pem", "cross_pem")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    CROSS_PEM_FIELD_NUMBER: _ClassVar[int]
    number: int
    certificate_pem: bytes
    refusal: str
    ca_pem: bytes
    cross_pem: bytes
    def __init__(self, number: _Optional[int] = ..., certificate_pem: _Optional[bytes] = ..., refusal: _Optional[str] = ..., ca_pem: _Optional[bytes] = ..., cross_pem: _Optional[bytes] = ...) -> None: ...
