"""The rules of authorisation: one table; a method that is not in it is denied. Pure.

A row names a method, the roles that may call it, and for each role the object in a call that must belong to the caller:
`claims` finds it in the messages, and `guard` compares it with the caller's certificate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from atoll.protocol.identity.names import Role


class Touches(StrEnum):
    """Object in a call that must belong to the caller, as its certificate proves; a name in a message is not enough."""

    NOTHING = "nothing that is one caller's own"
    OWN_NAME = "its own name"
    OWN_RUNS = "the runs that it has joined"
    OWN_RANK = "its own number"
    SITES = "clients and aggregators"


@dataclass(frozen=True, slots=True)
class Rule:
    """Roles that may call one method."""

    roles: Mapping[Role, Touches]
    is_open: bool = False
    """Whether the method is open to all, even without a certificate."""


def _only(*roles: Role, touching: Touches = Touches.NOTHING) -> dict[Role, Touches]:
    return dict.fromkeys(roles, touching)


_OPERATORS = _only(Role.OWNER, Role.OPERATOR)
READERS = _only(Role.OWNER, Role.OPERATOR, Role.AUDITOR)
_MEMBERS = _only(Role.CLIENT, touching=Touches.OWN_RUNS)
_RANKS = _only(Role.AGGREGATOR)
_GRANTERS = {**_only(Role.OWNER), **_only(Role.OPERATOR, touching=Touches.SITES)}
_EVERYBODY = Rule({}, is_open=True)

_COORDINATOR, _AGGREGATOR, _AGGREGATION, _ADMIN, _ENROLMENT, _MEMBERSHIP, _SIGNING = (
    f"/atoll.v1.{service}/"
    for service in ("Coordinator", "Aggregator", "Aggregation", "Admin", "Enrolment", "Membership", "Signing")
)

RULES: Mapping[str, Rule] = {
    _COORDINATOR + "Session": Rule(_only(Role.CLIENT, touching=Touches.OWN_NAME)),
    _COORDINATOR + "GetManifest": Rule({**_MEMBERS, **_RANKS, **READERS}),
    _COORDINATOR + "Download": Rule({**_MEMBERS, **_RANKS, **_OPERATORS}),
    _COORDINATOR + "Upload": Rule(_only(Role.CLIENT, touching=Touches.OWN_NAME)),
    _AGGREGATOR + "Download": Rule({**_MEMBERS, **_only(Role.COORDINATOR), **_OPERATORS}),
    _AGGREGATOR + "Upload": Rule(_only(Role.CLIENT, touching=Touches.OWN_NAME)),
    _AGGREGATION + "Serve": Rule(_only(Role.AGGREGATOR, touching=Touches.OWN_RANK)),
    _AGGREGATION + "Admit": Rule(_RANKS),
    _AGGREGATION + "OpenUpdate": Rule(_RANKS),
    _AGGREGATION + "SubmitUpdate": Rule(_only(Role.AGGREGATOR, touching=Touches.OWN_RANK)),
    _AGGREGATION + "SubmitPart": Rule(_only(Role.AGGREGATOR, touching=Touches.OWN_RANK)),
    _AGGREGATION + "GetUpdates": Rule(_only(Role.AGGREGATOR, touching=Touches.OWN_RANK)),
    _AGGREGATION + "FindUnused": Rule(_only(Role.AGGREGATOR, touching=Touches.OWN_RANK)),
    _ADMIN + "StartRun": Rule(_OPERATORS),
    _ADMIN + "CollectStatistics": Rule(_OPERATORS),
    _ADMIN + "StopRun": Rule(_OPERATORS),
    _ADMIN + "PauseRun": Rule(_OPERATORS),
    _ADMIN + "ResumeRun": Rule(_OPERATORS),
    _ADMIN + "DeleteRun": Rule(_only(Role.OWNER)),
    _ADMIN + "ListRanks": Rule(READERS),
    _ADMIN + "Look": Rule(READERS),
    _ADMIN + "Follow": Rule(READERS),
    _ADMIN + "ReadAuditLog": Rule(READERS),
    _ADMIN + "Invite": Rule(_GRANTERS),
    _ADMIN + "Revoke": Rule(_GRANTERS),
    _ADMIN + "ListMembers": Rule(READERS),
    _ENROLMENT + "GetAuthority": _EVERYBODY,
    _ENROLMENT + "Enrol": _EVERYBODY,
    _MEMBERSHIP + "Renew": Rule(_only(*(role for role in Role if role is not Role.AUTHORITY))),
    _SIGNING + "Serve": Rule(_only(Role.AUTHORITY)),
    "/grpc.health.v1.Health/Check": _EVERYBODY,
    "/grpc.health.v1.Health/Watch": _EVERYBODY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Rule(_OPERATORS),
}
"""Rules by the full name of the method; `docs/authorisation.md` shows them, and a test compares them with the
services."""


def needed(rule: Rule | None) -> str:
    """Describe the roles that a call needs, for a caller with another role."""
    if rule is None:
        return "no rule allows it, for any role"
    return f"it takes the role {' or '.join(rule.roles)}"
