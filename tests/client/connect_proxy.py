"""An HTTP proxy in its own process: CONNECT to any host leads to one port of this machine.

    python connect_proxy.py PORT [USER:PASSWORD]

It prints its own port, then for each request a line of JSON: {"to", "status"}; and {"up", "down"} when a tunnel ends.
"""

import asyncio
import base64
import json
import sys
from contextlib import asynccontextmanager


async def serve(port, login):
    server = await asyncio.start_server(lambda r, w: tunnel(r, w, port, login), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def tunnel(reader, writer, port, login):
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, target, _ = head[0].split()
    status = "200" if method == "CONNECT" else "405"
    if login and f"Proxy-Authorization: Basic {base64.b64encode(login.encode()).decode()}" not in head:
        status = "407"
    print(json.dumps({"to": target, "status": status}), flush=True)
    writer.write(f"HTTP/1.1 {status} -\r\n\r\n".encode())
    if status == "200":
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        up, down = await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))
        print(json.dumps({"up": up, "down": down}), flush=True)
    writer.close()


async def pump(source, sink):
    count = 0
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
            count += len(data)
    except ConnectionError:
        pass
    sink.close()
    return count


@asynccontextmanager
async def connect_proxy(port, login=""):
    """The proxy's process, its `address`, and the `tunnels()` that it has printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, str(port), login), stdout=asyncio.subprocess.PIPE
    )
    try:
        proxy = Running(int(await process.stdout.readline()))
        reading = asyncio.ensure_future(proxy.read(process.stdout))
        yield proxy
        reading.cancel()
    finally:
        process.kill()
        await process.wait()


class Running:
    def __init__(self, port):
        self.address, self.lines = f"127.0.0.1:{port}", []

    async def read(self, stdout):
        while line := await stdout.readline():
            self.lines.append(json.loads(line))


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
