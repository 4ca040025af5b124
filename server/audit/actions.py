"""The names of the actions that the audit log records."""

from enum import StrEnum


class Action(StrEnum):
    """Action of an audit event; `object` is the thing that it concerned, `outcome` the result.

    `docs/audit.md` describes each action.
    """

    COORDINATOR_START = "coordinator.start"
    COORDINATOR_STOP = "coordinator.stop"
    RUN_ADD = "run.add"
    RUN_RECOVER = "run.recover"
    RUN_START = "run.start"
    RUN_PAUSE = "run.pause"
    RUN_STOP = "run.stop"
    RUN_RESUME = "run.resume"
    RUN_DELETE = "run.delete"
    RUN_END = "run.end"
    ROUND_COMMIT = "round.commit"
    ROUND_ABANDON = "round.abandon"
    PRIVACY_CHARGE = "privacy.charge"
    PRIVACY_PUBLISHED = "privacy.published"
    PRIVACY_RAISE = "privacy.raise"
    CLOCK_ACCEPT = "clock.accept"
    CLOCK_JUMP = "clock.jump"
    LOSS_ACCEPT = "loss.accept"
    CLIENT_JOIN = "client.join"
    CLIENT_LEAVE = "client.leave"
    CLIENT_LOST = "client.lost"
    CLIENT_INVITE = "client.invite"
    CLIENT_VOID = "client.void"
    CLIENT_ENROL = "client.enrol"
    CLIENT_RENEW = "client.renew"
    CLIENT_REVOKE = "client.revoke"
    CALL = "call"
    CALL_REFUSE = "call.refuse"
    MODEL_EXPORT = "model.export"
    STATISTICS_COLLECT = "statistics.collect"
    STATE_BACKUP = "state.backup"
    STATE_RESTORE = "state.restore"
    AUDIT_REPAIR = "audit.repair"
    AUDIT_FAULT = "audit.fault"
    AUDIT_ARCHIVE = "audit.archive"
    AUDIT_WITHHELD = "audit.withheld"
    AUDIT_LOST = "audit.lost"
