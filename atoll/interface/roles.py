"""The rights of a role at the Admin service, by the rules of the coordinator."""

from atoll.interface.errors import AtollError


def check_role(role: str, method: str, of: str = "") -> None:
    """Check that a role may call a method of the Admin service.

    Args:
        role: the role of the caller.
        method: the name of the method, such as `PauseRun`.
        of: the role of the member that the call is about; empty: it is about none.

    Raises:
        AtollError: it may not; the message says which role may.
    """
    from atoll.protocol.identity.names import Role
    from atoll.server.identity.rules import RULES, Touches, needed

    rule = RULES.get(f"/atoll.v1.Admin/{method}")
    if rule is None or role not in rule.roles:
        raise AtollError(f"the role {role} may not do this: {needed(rule)}")
    if rule.roles[Role(role)] is Touches.SITES and of not in (Role.CLIENT, Role.AGGREGATOR):
        raise AtollError(f"the role {role} invites and revokes {Touches.SITES} alone")
