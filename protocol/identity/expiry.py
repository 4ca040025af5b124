"""The wait of a member whose certificate has expired by this machine's clock, which may be wrong.

A machine may start with a clock that is ahead, and get its time from NTP a moment later. The coordinator regularly
renews its certificate: if this one is valid by the member's clock, the clocks agree, and the member's certificate has
indeed expired.
"""

import asyncio
import logging
import os
import time

from atoll.protocol.identity.certificates import CertificateError, is_issued_by, read_certificates, validity_of
from atoll.protocol.identity.credential import Credential, CredentialError
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.proxy import HttpProxy
from atoll.protocol.identity.shown_certificate import certificate_at
from atoll.protocol.settings import ConfigError

logger = logging.getLogger(__name__)

AGAIN_S = 15.0
"""Interval between two checks of the coordinator's certificate [s]."""

LOOK_S = 5.0
"""Time limit of one check [s]."""


async def wait_until_valid(keeper: Keeper, address: str) -> None:
    """Wait while the keeper's certificate has expired by a clock that may be wrong.

    Args:
        keeper: the keeper of this member's credential.
        address: host:port of the coordinator.

    Raises:
        CredentialError: the certificate has expired, and the coordinator's clock agrees.
    """
    complaint = ""
    while True:
        try:
            keeper.check()
            return
        except CredentialError as error:
            if (doubt := await doubt_about_clock(keeper.current, address)) is None:
                raise
            if doubt != complaint:
                logger.warning("%s; %s: waiting", error.faults[0], doubt)
            complaint = doubt
        await asyncio.sleep(AGAIN_S)


async def doubt_about_clock(own: Credential, address: str) -> str | None:
    """Return why this machine's clock, by which its certificate has expired, may be wrong; None: the clocks agree.

    Args:
        own: this member's credential.
        address: host:port of the coordinator.
    """
    try:
        shown = await certificate_at(address, HttpProxy.of(os.environ), timeout_s=LOOK_S)
        certificate = read_certificates(shown)[0]
    except (OSError, TimeoutError, CertificateError, ConfigError):
        return f"the coordinator at {address} does not answer, so its clock is not known"
    times = validity_of(certificate)
    if times.includes(time.time()) or not is_issued_by(shown, own.ca_pem):
        return None
    what = f"the certificate of the coordinator at {address} is valid {times}"
    return f"{what}, so this machine's clock is probably wrong (NTP)"
