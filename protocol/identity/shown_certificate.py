"""The certificate that a server shows, fetched by a TLS handshake that verifies nothing and sends no data."""

import asyncio
import ssl
from contextlib import suppress

from atoll.protocol.identity.certificates import server_name
from atoll.protocol.identity.names import COORDINATOR, Identity
from atoll.protocol.identity.proxy import HttpProxy
from atoll.protocol.wire.channel import HANDSHAKE_S


async def certificate_at(
    address: str, proxy: HttpProxy | None, server: Identity = COORDINATOR, *, timeout_s: float = HANDSHAKE_S
) -> bytes:
    """Return the certificate (PEM) of the server at an address, unverified.

    Args:
        address: host:port.
        proxy: the proxy of this site, or None.
        server: the identity whose name the handshake asks for.
        timeout_s: the timeout of the connection and the handshake [s].

    Raises:
        OSError, TimeoutError: no server answers, or the handshake takes too long.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    name = server_name(server)
    if proxy is not None and proxy.is_for(address):
        opening = proxy.open_tls(address, context, name)
    else:
        opening = asyncio.open_connection(host.strip("[]"), int(port), ssl=context, server_hostname=name, limit=2**16)
    _, writer = await asyncio.wait_for(opening, timeout_s)
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()  # closed abruptly: the server is not verified
        with suppress(OSError):
            await writer.wait_closed()
    return ssl.DER_cert_to_PEM_cert(shown).encode()
