"""Receivers of messages on loopback: an HTTP server and a mail server, each on a thread."""

import json
import socketserver
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def http_server(*, status=200, before=lambda: None, reply=None):
    """Yield an HTTP server with `url`, and `bodies` and `headers` of what was posted; `status` may be changed.

    `reply`, called with the handler, answers in its place.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            before()
            if reply:
                return reply(self)
            if server.status == 200:
                server.bodies.append(json.loads(body))
                server.heads.append(dict(self.headers))
            self.send_response(server.status)
            if server.status in (301, 302, 307):
                self.send_header("Location", f"{server.url}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.bodies, server.heads, server.status = True, [], [], status
    server.url = f"http://127.0.0.1:{server.server_address[1]}/hook/secret"
    yield from _serving(server)


@contextmanager
def mail_server(*, refuses=False):
    """Yield a mail server with `address`, and the `mails` that it took, each as (sender, receiver, text)."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            self.say("220 test")
            sender = receiver = ""
            while line := self.rfile.readline().decode():
                word = line.split(maxsplit=1)[0].upper() if line.strip() else ""
                if word in ("EHLO", "HELO"):
                    self.say("250 test")
                elif word == "MAIL":
                    sender = line.partition("<")[2].partition(">")[0]
                    self.say("250 ok")
                elif word == "RCPT":
                    receiver = line.partition("<")[2].partition(">")[0]
                    self.say("550 no such mailbox" if refuses else "250 ok")
                elif word == "DATA":
                    self.say("354 go on")
                    lines = []
                    while (part := self.rfile.readline().decode()).rstrip("\r\n") != ".":
                        lines.append(part)
                    server.mails.append((sender, receiver, "".join(lines)))
                    self.say("250 taken")
                elif word == "QUIT":
                    return self.say("221 bye")
                else:
                    self.say("250 ok")
            return None

        def say(self, text):
            self.wfile.write(f"{text}\r\n".encode())

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.mails = True, []
    server.address = f"127.0.0.1:{server.server_address[1]}"
    yield from _serving(server)


def _serving(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
