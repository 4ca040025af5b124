"""The name of the coordinator that a process connects to, for the first line that the process prints."""

from contextlib import suppress
from pathlib import Path


def dialled(coordinator: str, join: str, folder: Path) -> str:
    """Return `the coordinator at HOST:PORT` as the settings or an enrolment give it, or `the coordinator`.

    Args:
        coordinator: the address in the settings; empty: the one from the enrolment.
        join: the join code; empty: the process has enrolled before.
        folder: the folder of the process's credential.
    """
    from atoll.protocol.identity.credential import CredentialError
    from atoll.protocol.identity.enrolling import Place
    from atoll.protocol.identity.join_code import JoinCode, JoinCodeError

    addresses: tuple[str, ...] = (coordinator,) if coordinator else ()
    if not addresses:
        with suppress(CredentialError):
            addresses = (Place.load(folder).address,)
    if not any(addresses) and join:
        with suppress(JoinCodeError):
            addresses = JoinCode.parse(join).addresses
    known = " or ".join(filter(None, addresses))
    return f"the coordinator at {known}" if known else "the coordinator"
