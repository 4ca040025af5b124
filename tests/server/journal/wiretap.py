"""A relay before a PostgreSQL server that breaks a connection at a chosen commit. It reads clear text."""

import select
import socket
import threading
from typing import Literal

Break = Literal["before", "after", "silently"]


class Wiretap:
    """Relays one connection after the other; `plan` says at which commit from now on the connection breaks, and how.

    before: the commit does not reach the server. after: the server has done it, the client never hears of it.
    silently: the client's half is cut, the server's stays open, as when a machine between them loses its memory.
    """

    def __init__(self, to: str) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.plan: list[Break | None] = []  # for each commit from now on; None: it goes through
        self.broken: list[Break] = []
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        for kept in (*self._kept, self._listener):
            kept.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._to)
        keep = False
        try:
            keep = self._pump(client, server)
        except OSError:
            pass
        finally:
            client.close()
            if keep:
                self._kept.append(server)
            else:
                server.close()

    def _pump(self, client: socket.socket, server: socket.socket) -> bool:
        """Forward the bytes of one direction; return whether the server's half of the connection stays open."""
        while True:
            ready, _, _ = select.select([client, server], [], [])
            if server in ready:
                if not (data := server.recv(1 << 16)):
                    return False
                client.sendall(data)
            if client in ready:
                if not (data := client.recv(1 << 16)):
                    return False
                how = self.plan.pop(0) if b"COMMIT" in data and self.plan else None
                if how is not None:
                    self.broken.append(how)
                if how == "before":
                    return False
                server.sendall(data)
                if how is not None:
                    server.recv(1 << 16)  # the server's answer: it has committed
                    return how == "silently"
