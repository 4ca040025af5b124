"""The calls of the services in `atoll.proto`, made from their descriptors: protoc would write 1,500 lines for them."""

from collections.abc import Iterator, Mapping
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from atoll.protocol import atoll_pb2

Forms = Mapping[str, tuple[Any, Any]]
"""Functions that write the messages of this side and read those of the other, by method; else protobuf's."""


class Stub:
    """The client's side of a service: `stub.Method(request, timeout=...)`.

    Args:
        channel: of grpc.aio, or of grpc, whose calls are for threads.
        service: its name in the proto.
        forms: the methods whose messages are written and read in another way.
    """

    def __init__(self, channel: Any, service: str, forms: Forms | None = None) -> None:
        for name, kind, request, reply in _methods(service):
            write, read = (forms or {}).get(name, (request.SerializeToString, reply.FromString))
            call = getattr(channel, kind)(_path(service, name), write, read, _registered_method=True)
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the service has no method {name}")


def add_servicer(servicer: object, server: Any, service: str, forms: Forms | None = None) -> None:
    """Let a server of grpc.aio answer a service by an object's methods; UNIMPLEMENTED for those that it lacks."""
    handlers = {}
    for name, kind, request, reply in _methods(service):
        write, read = (forms or {}).get(name, (reply.SerializeToString, request.FromString))
        if (answer := getattr(servicer, name, None)) is not None:
            handlers[name] = getattr(grpc, f"{kind}_rpc_method_handler")(answer, read, write)
    full = _service(service).full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(full, handlers),))
    server.add_registered_method_handlers(full, handlers)


def _service(name: str) -> Any:
    return atoll_pb2.DESCRIPTOR.services_by_name[name]


def _path(service: str, method: str) -> str:
    return f"/{_service(service).full_name}/{method}"


def _methods(service: str) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield each method's name, its kind as grpc names it, such as "unary_stream", and the classes of its messages."""
    kind = ("unary", "stream")
    for each in _service(service).methods:
        name = f"{kind[each.client_streaming]}_{kind[each.server_streaming]}"
        yield each.name, name, GetMessageClass(each.input_type), GetMessageClass(each.output_type)
