"""An authority for tests, members of every role, and servers and channels that use their certificates."""

import time
from contextlib import asynccontextmanager

import grpc

from atoll.protocol.identity.certificates import Issuer, key_to_pem, new_key, server_name, to_pem
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.names import Identity, Role

AUTHORITY = Issuer.create("test", now=time.time())
MAIN = Identity(Role.COORDINATOR, "main")


class Member:
    """One certificate and its key."""

    def __init__(self, identity, issuer=AUTHORITY):
        key = new_key()
        self.identity, self.certificate = identity, issuer.issue(key.public_key(), identity, now=time.time())
        self.pair = key_to_pem(key), to_pem(self.certificate)
        self.roots = to_pem(issuer.certificate)

    @property
    def credential(self):
        key, certificate = self.pair
        return Credential(key, certificate, self.roots)

    @property
    def serial(self):
        return self.certificate.serial_number

    def channel(self, address, to=MAIN):
        credentials = grpc.ssl_channel_credentials(self.roots, *self.pair)
        return grpc.aio.secure_channel(address, credentials, [("grpc.ssl_target_name_override", server_name(to))])


def member(role, name):
    return Member(Identity(role, name))


@asynccontextmanager
async def listening(add, guard, identity=MAIN, *, asks_for_certificates=True):
    """The address of a server with a guard; `add` adds the services."""
    server = grpc.aio.server(interceptors=[guard])
    add(server)
    own = Member(identity)
    credentials = grpc.ssl_server_credentials([own.pair], own.roots, require_client_auth=asks_for_certificates)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
