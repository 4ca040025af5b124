"""The parsers that meet what others wrote, with valid inputs to begin from, and the errors that they document."""

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.protobuf.message import DecodeError
from pydantic import BaseModel

from atoll.client.config import AgentConfig
from atoll.client.policy.config import SitePolicy
from atoll.client.site.fingerprint_list import list_text, parse_list
from atoll.client.site.key_file import KeyFault, parse_site_key
from atoll.client.site.peers import Peers, parse_peers
from atoll.client.wire.messages import BadMessage, event_of, hello
from atoll.ground.strict_json import ManifestError
from atoll.parallel.private.account import AccountBroken
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.audit import chain
from atoll.protocol.identity.certificates import CertificateError, certified_key, check_issued, read_leaf, read_request
from atoll.protocol.identity.join_code import PREFIX, JoinCode, JoinCodeError
from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.identity.proxy import HttpProxy
from atoll.protocol.identity.statement import NotTrusted, check_publisher, check_signature
from atoll.protocol.manifest import parse_update, parse_version
from atoll.protocol.part_manifest import PartManifest, check_parts, parse_part, part_of
from atoll.protocol.secure.boxes import BadBox
from atoll.protocol.secure.wire import BadForm
from atoll.protocol.settings import ConfigError, load_text
from atoll.server.backup.contents import BackupFailed, Contents, Part, parse_contents
from atoll.server.config.process import AggregatorConfig, HostFile
from atoll.server.config.run import RunFile
from atoll.server.errors import StoreCorrupted
from atoll.server.hosting.update_judge import UpdateJudge
from atoll.server.journal.codec import decode_ledger, decode_page, encode_ledger, encode_page
from atoll.server.services.coordinator_service import _connection, _fault_of_hello
from atoll.simulations.experiments.grid import parse_grid
from atoll.simulations.experiments.sweep import check_cells
from atoll.simulations.federation.config import SimulationFile
from atoll.tensors.layout import Tensor
from atoll.tensors.safetensors_header import decode_header, header_bytes
from atoll.tensors.secure.exact import WrongSum
from tests.fuzz import privacy_targets as privacy
from tests.fuzz import secure_targets as sums
from tests.fuzz.make_corpus import NOW, PATH
from tests.protocol.test_manifest import UPDATE, VERSION
from tests.protocol.test_part_manifest import LAYOUT, PARTS, ROOT
from tests.server.rounds.test_privacy import closed, private, rules

_KEPT = {name: [base64.b64decode(text) for text in found] for name, found in json.loads(PATH.read_text()).items()}


@dataclass(frozen=True, slots=True)
class Target:
    """One parser. `inner` is what is mutated; `wrap` makes an input of it that comes past sums and encodings."""

    parse: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    corpus: Sequence[bytes]
    tokens: Sequence[bytes] = ()
    wrap: Callable[[bytes], bytes] = bytes


def _text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    """A parser of text, given bytes as they come: what is no UTF-8 reaches it with surrogates, as on a command line."""

    def of_bytes(data: bytes) -> object:
        return parse(data.decode("utf-8", "surrogateescape"))

    return of_bytes


# ---------------------------------------------------------------- settings

_TOML = {
    RunFile: [
        b'name = "digits"\ntask = "t.py:task"\nrounds = 5\n[round]\nquorum = 2\ndeadline = "adaptive"\n',
        b'task = "m:t"\n[secure]\nbits = 32\nclip_norm = 1.0\nexamples_max = 100\nattempts = 2\n',
        b'task = "m:t"\naggregation.weighting = "uniform"\n[privacy]\nepsilon = 8.0\ndelta = 1e-6\nclip_norm = 1.0\n',
        b'task = "m:t"\n[cohort]\nsampler = "random"\n[local]\nlr = 0.1\na = [1, 2]\n',
    ],
    HostFile: [b'[coordinator]\nlisten = "127.0.0.1:7070"\nstate = "s"\nlease = 15.0\nkeep_versions = 3\n'],
    AggregatorConfig: [b'coordinator = "127.0.0.1:7070"\nrank = 0\nranks = 2\nstate = "s"\n'],
    AgentConfig: [b'site = "north"\njoin = "127.0.0.1:7070"\nthreads = 1\nlease = 3e1\nexit_when_done = true\n'],
    SimulationFile: [
        b'task = "m:t"\n[population]\nkind = "quantity"\nclients = 9\nsigma = 1.5\n[simulation]\nengine = "batched"\n',
        b'task = "m:t"\ndevices.up_bytes_per_s = {low = 1e3, high = 2e6}\nattack = {kind = "alie", malicious = 0.3}\n',
    ],
    SitePolicy: [
        b'tasks = ["a:*"]\nruns = ["*"]\napproval = "each_run"\n[hours]\ndays = ["mon"]\nend = "06:00"\n',
        b'tasks = ["a"]\n[secure]\nrequired = true\nmin_others = 3\ntrust = "pinned"\ncolluders_max = 1\n',
        b'tasks = []\nruns = []\ntime_zone = "Europe/Berlin"\nrounds_per_day = 3\nhours.begin = "20:00"\n',
    ],
}
_TOML_TOKENS = [
    b'"""',
    b"'''",
    b"[[",
    b"]]",
    b"1979-05-27T07:32:00Z",
    b"0b1",
    b"1_0",
    b"\n[a]\n",
    b"\\U0010ffff",
    b" = ",
]


def _settings(model: type[BaseModel]) -> Target:
    parse = _text(partial(load_text, model, name="f.toml"))
    return Target(parse, (ConfigError,), _TOML[model], _TOML_TOKENS)


_SWEEPS = [
    b'task = "m:t"\n[grid]\n"round.quorum" = [1, 0.5]\nseed = [1, 2]\n[sweep]\ntarget = 0.9\nover = ["seed"]\n',
    b'task = "m:t"\nrounds = 3\n[[grid.x]]\nname = "a"\nlocal = {lr = 0.1}\n[[grid.x]]\nname = "b"\nlocal.lr = 1\n',
]


def _sweep(data: bytes) -> None:
    grid = parse_grid(data, Path("f.toml"))
    assert len({cell.folder for cell in grid.cells}) == len(grid.cells)
    check_cells(grid.cells)


# ---------------------------------------------------------------- messages of clients


class Refused(ValueError):
    """What the coordinator answers with a fault rather than by raising one."""


_WORK = [("r-1", 3)]
_HELLO = hello(
    site="north", session="s", tasks=["m:t"], num_examples=9, label="a", working_on=_WORK, software="atoll 1"
)
_SUMS = {"mean": pb.Statistics(values=[1.0, 2.0]), "loss": pb.Statistics(values=[0.5, 2.0, 9.0])}
_HELLOS = [pb.ClientMessage(hello=_HELLO).SerializeToString()]
_OPENED = [
    pb.UploadOpen(manifest=UPDATE.encode(), statistics=_SUMS, train_seconds=3.0).SerializeToString(),
    *(pb.UploadOpen(manifest=ROOT.encode(), part=part.encode()).SerializeToString() for part in PARTS),
]


def _hello(data: bytes) -> None:
    message = pb.ClientMessage.FromString(data)
    if (fault := _fault_of_hello(message)) is not None:
        raise Refused(fault)
    assert _connection(message.hello, "127.0.0.1:1").profile.num_examples >= 0


PLAIN_RUN = SimpleNamespace(config=SimpleNamespace(privacy=None))


def _opened(data: bytes) -> None:
    opened = pb.UploadOpen.FromString(data)
    manifest = parse_update(opened.manifest)
    part = part_of(manifest, opened.part)
    UpdateJudge.of(PLAIN_RUN, manifest, opened, part)  # type: ignore[arg-type] # nothing else is asked of it yet


def _part(data: bytes) -> None:
    """Read a part, and hold it against the model as if it were the only one."""
    check_parts(LAYOUT, [parse_part(data)])


# ---------------------------------------------------------------- identities

_CODE = JoinCode(("atoll.example:7070", "[2001:db8::1]:1"), bytes(range(32)), bytes(8), bytes(range(16)))
_CODE_BODY = bytes([1]) + _CODE.id + _CODE.secret + _CODE.fingerprint


def _as_code(body: bytes) -> bytes:
    """The join code of a body that may be anything, with the right sum."""
    whole = body + zlib.crc32(body).to_bytes(4, "big")
    return PREFIX.encode() + base64.b32encode(whole).rstrip(b"=")


def _as_pem(der: bytes) -> bytes:
    return b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(der) + b"-----END CERTIFICATE-----\n"


def _certificate(pem: bytes) -> None:
    leaf = read_leaf.__wrapped__(pem)  # nothing is remembered of a hundred thousand certificates
    assert leaf.identity.role in Role
    read_leaf.cache_clear()
    check_issued(pem, _KEPT["authority"][0], certified_key(pem))


def _publisher(data: bytes) -> None:
    read_leaf.cache_clear()
    check_publisher(pb.Publisher.FromString(data), _KEPT["authority"][0], NOW)


def _message(data: bytes) -> None:
    message = pb.ServerMessage.FromString(data)
    event_of(message)
    check_signature(message, "north", Ed25519PublicKey.from_public_bytes(_KEPT["publisher_key"][0]))


# ---------------------------------------------------------------- manifests, headers, the audit log

_LAYOUT = (Tensor("bias", "F32", (3,)), Tensor("weight", "BF16", (2, 3)), Tensor("n", "I64", ()))
_HEADERS = [header_bytes(_LAYOUT)[8:], header_bytes(_LAYOUT, {"by": "atoll"})[8:]]
_EVENT = chain.Event("2026-05-04T12:00:00.000000Z", "ann", "operator", "run.start", "r-1", "ok", {"task": "ab"})
_CHECKPOINT = {"key": "0" * 64, "prev": chain.GENESIS, "seq": 7, "signature": "0" * 128, "time": _EVENT.time}


def _as_line(data: bytes) -> bytes:
    """The line that says the same as some JSON in canonical form, if it is JSON."""
    try:
        said: Any = json.loads(data)
        return json.dumps(said, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    except (ValueError, RecursionError):
        return data


def _line(data: bytes) -> None:
    line = chain.read_line(data)
    if line.event is None:
        chain.is_signed(line)


_LINES = [chain.event_line(_EVENT, chain.Head())[0], _as_line(json.dumps(_CHECKPOINT).encode())]
_JSON_TOKENS = [
    b'"a":',
    b'"seq":',
    b'"dtype":"F32"',
    b'"shape":[',
    b'"codec":"topk:0.01","num_bytes":6',
    b"1.0",
    b"[0]",
]
_PART = Part(path="runs/r-1/ranks", num_bytes=1, mode=0o600, sha256="0" * 64)
_WORDS = sums.masked_pieces()
_MASKED = [
    replace(UPDATE, client_id="north", num_examples=1, work=1.0, pieces=_WORDS).encode(),
    PartManifest(0, _WORDS[:2]).encode(),
]
_CONTENTS = [Contents(atoll="1", made_at=1.5, has_keys=True, files=[_PART]).model_dump_json().encode()]
_PRIVATE = private(rules(uses=3))
closed(_PRIVATE)
_PRIVATE.fold()
_LEDGER = encode_ledger(_PRIVATE.machine.ledger)
_CHARGED = _PRIVATE.machine.ledger.membership.members
_MEMBERS = encode_page(_CHARGED, _CHARGED)


def _ledger(data: bytes) -> None:
    """Read a ledger; what is accepted can be written again."""
    encode_ledger(decode_ledger(data.decode("utf-8", "replace"), where="here"))


def _members(data: bytes) -> None:
    found = decode_page(data.decode("utf-8", "replace"), where="here")
    encode_page(found, found)


_URIS = [b"atoll://client/north", b"atoll://coordinator/main", b"atoll://aggregator/3"]

_PEERS = [Peers({"east": "01" * 16, "north": "23" * 16}, frozenset({"west"})).encode()]
_PRINTS = [list_text({"east": "01" * 16, "north": "23" * 16}).encode()]
_SITE_KEYS = [
    Ed25519PrivateKey.from_private_bytes(bytes(range(32))).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
]

TARGETS = {
    "manifest of a version": Target(parse_version, (ManifestError,), [VERSION.encode()], _JSON_TOKENS),
    "manifest of an update": Target(parse_update, (ManifestError,), [UPDATE.encode(), ROOT.encode()], _JSON_TOKENS),
    "manifest of a part": Target(_part, (ManifestError,), [part.encode() for part in PARTS], _JSON_TOKENS),
    "TOML of a run": _settings(RunFile),
    "ledger of a private run": Target(
        _ledger, (StoreCorrupted,), [_LEDGER.encode()], [b'"uses":', b'"spent":', b"NaN"]
    ),
    "members of a private run": Target(
        _members, (StoreCorrupted,), [_MEMBERS.encode()], [b'"uses":', b'"spent":', b"-1"]
    ),
    "row of a site's budgets": Target(
        privacy.row, (ManifestError,), privacy.ROWS, [b'"steps":', b'"3ff8000000000000"', b'"0000000000000001"', b"\0"]
    ),
    "memory of a site's budgets": Target(privacy.anchor, (ManifestError,), privacy.ANCHORS, [b'"count":', b'"names":']),
    "privacy of a training": Target(
        privacy.terms, (ValueError,), privacy.TERMS, [b'"privacy.', b'"kind":', b"1e-9", b"1e999", b"NaN", b"true"]
    ),
    "privacy of a sum": Target(
        privacy.of_sum, (ManifestError,), privacy.OF_SUMS, [b'"honest_min":', b'"colluders":', b'"3ff8000000000000"']
    ),
    "account of a private training": Target(
        privacy.steps, (AccountBroken,), privacy.STEPS, [b'"steps":', b'"at":', b"-1", b"1e3", b"true"]
    ),
    "TOML of a coordinator": _settings(HostFile),
    "TOML of a rank": _settings(AggregatorConfig),
    "TOML of an agent": _settings(AgentConfig),
    "TOML of a simulation": _settings(SimulationFile),
    "TOML of a sweep": Target(_sweep, (ConfigError,), _SWEEPS, [*_TOML_TOKENS, b"[[grid.x]]"]),
    "TOML of a policy": _settings(SitePolicy),
    "peers of a site": Target(parse_peers, (ManifestError,), _PEERS, [b'"pinned":', b'"a":', b"{}", b"[]"]),
    "list of fingerprints": Target(
        lambda data: parse_list(data, "list"), (ConfigError,), _PRINTS, [b"\n", b"#", b" ", b"0123"]
    ),
    "key of a site": Target(lambda data: parse_site_key(data, "site.pem"), (KeyFault,), _SITE_KEYS, [b"-----\n"]),
    "terms of a sum": Target(
        sums.terms, (ManifestError,), [sums.TERMS.canonical()], [b'"bits":', b'"0x1p+0"', b"64"], sums.canonical
    ),
    "message of a member": Target(sums.answer, (BadForm, DecodeError), sums.PLAYED.answers),
    "question to a member": Target(sums.question, (BadForm, DecodeError), sums.PLAYED.questions),
    "keys of a member": Target(sums.keys, (BadForm, NotTrusted, DecodeError), _KEPT["members"], [b"north"]),
    "box of shares": Target(sums.box, (BadBox,), [sums.BOX_CONTENT], [bytes(33), b"\x01" + bytes(32)], sums.sealed),
    "counts of a sum": Target(sums.counts, (WrongSum,), [sums.COUNTS], [bytes(8), b"\xff" * 8, b"\x01" + bytes(7)]),
    "promises of a site": Target(
        sums.promises, (sums.BrokenChain, ValueError, TypeError), [sums.PROMISES], [b'"joined"', b'"signed"', b'"",']
    ),
    "manifest of a masked update": Target(sums.masked, (sums.WrongWords, ManifestError), _MASKED, _JSON_TOKENS),
    "layout of statistics": Target(
        sums.layout,
        (ManifestError,),
        [sums.QUESTION.text.encode()],
        [b'["a",[0.5,1.5]]', b'["a",2]', b"1e999"],
        sums.canonical,
    ),
    "request for statistics": Target(sums.request, (sums.OtherTerms, BadMessage, DecodeError), [sums.REQUEST]),
    "numbers of statistics": Target(
        sums.statistics, (WrongSum, ValueError), [sums.STATISTICS], [bytes(8), b"\xff" * 8, b"\x01" + bytes(7)]
    ),
    "join code": Target(_text(JoinCode.parse), (JoinCodeError,), [str(_CODE).encode()], [b"atoll-"]),
    "join code with the right sum": Target(
        _text(JoinCode.parse),
        (JoinCodeError,),
        [_CODE_BODY + ",".join(_CODE.addresses).encode()],
        [b":7070", b"[::1]:1", b"127.0.0.1:1", b","],
        _as_code,
    ),
    "name in a certificate": Target(_text(Identity.parse), (ValueError,), _URIS, [b"atoll://", b"/"]),
    "certificate": Target(
        _certificate,
        (CertificateError,),
        _KEPT["certificates"],
        [b"atoll://", b"\x06\x03\x55\x1d\x11"],
        _as_pem,
    ),
    "request for a certificate": Target(read_request, (CertificateError,), _KEPT["requests"]),
    "Hello of a client": Target(_hello, (Refused, DecodeError), _HELLOS),
    "announcement of an update": Target(_opened, (ManifestError, DecodeError), _OPENED),
    "publisher": Target(_publisher, (NotTrusted, DecodeError), _KEPT["publishers"]),
    "signed message": Target(_message, (NotTrusted, BadMessage, DecodeError), _KEPT["messages"]),
    "header of safetensors": Target(lambda data: decode_header(data, 32), (ValueError,), _HEADERS, _JSON_TOKENS),
    "line of an audit log": Target(_line, (chain.LineFault,), _LINES, _JSON_TOKENS, _as_line),
    "contents of a backup": Target(parse_contents, (BackupFailed,), _CONTENTS, _JSON_TOKENS),
    "checkpoint": Target(_text(chain.Checkpoint.parse), (ValueError,), [b"7:" + b"0" * 64]),
    "HTTPS_PROXY": Target(
        _text(lambda text: HttpProxy.of({"https_proxy": text, "no_proxy": text})),
        (ConfigError,),
        [b"http://u:p%40@proxy.example:3128", b"http://[2001:db8::1]:80/", b"10.0.0.1:8080"],
        [b"://", b"@", b"[", b"]", b"%", b"https", b"#", b"?"],
    ),
}
