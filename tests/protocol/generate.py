"""Write the code that protoc makes of `protocol/atoll.proto`: `python -m tests.protocol.generate` (`make proto`).

The proto is compiled by its import path, `atoll/protocol/atoll.proto`: so the generated modules import each other as
`atoll.protocol.atoll_pb2`, and the file's name in protobuf's one global pool cannot collide with another package's.
"""

import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PROTO = Path("atoll/protocol/atoll.proto")
GENERATED = ("atoll_pb2.py", "atoll_pb2.pyi")


def generate(folder: Path) -> dict[str, bytes]:
    """Compile the proto below `folder`; return the generated files by name."""
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi")]
    code = protoc.main(["protoc", f"-I{ROOT}", *outputs, str(ROOT / PROTO)])
    if code != 0:
        raise RuntimeError(f"protoc ended with exit code {code}")
    return {name: (folder / PROTO.parent / name).read_bytes() for name in GENERATED}


def main() -> None:
    """Replace the checked-in code."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in generate(Path(folder)).items():
            (ROOT / "protocol" / name).write_bytes(content)
            print(f"wrote protocol/{name}")


if __name__ == "__main__":
    main()
