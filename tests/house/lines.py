"""The shipped lines by room and by capability, beside those at commit e5ce031d, when the rooms were cut anew.

Every line counts: code, docstrings, comments, blank lines. The longest prefix of a path gives its capability.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from tests.house.tree import Module

ROOMS_BEFORE = {
    "aggregation": 7914,
    "atoll": 15913,
    "client": 7831,
    "parallel": 38877,
    "protocol": 7663,
    "server": 30761,
    "simulations": 24441,
}

CAPABILITIES: dict[str, tuple[int, str]] = {
    "Flower apps: hosted, native, commands": (
        3297,
        "flower/ parallel/flower/ atoll/cli/flower/ atoll/operations/flower_plan",
    ),
    "Flower: a task exported as an app": (
        1105,
        "flower/exported/ atoll/cli/flower/app_files atoll/cli/flower/counterparts atoll/cli/flower/export "
        "atoll/cli/flower/sources atoll/cli/flower/templates",
    ),
    "runs of messages": (
        4655,
        "server/exchanges/ server/programs/ server/hosting/message server/journal/exchanges server/views/exchange_ "
        "server/views/message_ simulations/messages/ task/programs/ task/content atoll/cli/experiments/messages",
    ),
    "task: what a user writes": (2675, "task/"),
    "custom code: rules, codecs, samplers": (
        1130,
        "plugins/ atoll/cli/plugins aggregation/custom_optimizer tensors/codecs/custom_ tensors/codecs/installed",
    ),
    "local training in one process": (3490, "training/ training/local/"),
    "worker process": (2439, "training/worker/ ground/process/"),
    "frozen bases, adapters, Hugging Face": (
        1378,
        "training/base/ parallel/huggingface/ atoll/operations/adapter_export",
    ),
    "statistics of a site's data": (
        1734,
        "training/statistics/ server/statistics/ server/hosting/statistics_ simulations/federation/statistics "
        "client/policy/small_cells protocol/site_statistics task/statistic atoll/cli/runs/statistics",
    ),
    "mesh client": (
        5474,
        "parallel/mesh_client/ parallel/exchange/ client/work/crew client/crew_config protocol/wire/mesh_use",
    ),
    "updates in parts": (
        658,
        "server/parts/ server/files/part_ server/transfers/parts client/wire/part_ protocol/part_manifest",
    ),
    "engine of a mesh": (4423, "parallel/ parallel/engine/"),
    "trials of what a model admits": (1876, "training/trials/ parallel/trials/"),
    "launcher of ranks": (
        1031,
        "parallel/launch/ parallel/world atoll/operations/training/launch atoll/operations/training/rank",
    ),
    "planner": (3442, "parallel/planner/ atoll/cli/training/plan atoll/operations/plan"),
    "centralized training": (
        3491,
        "parallel/trainer/ atoll/cli/training/ atoll/operations/training/ atoll/interface/trained",
    ),
    "checkpoints": (1556, "parallel/checkpoint/"),
    "DiLoCo, local SGD, compression": (906, "parallel/communication/"),
    "optimizers of large batches": (1416, "training/optimizers/ parallel/optimizers/"),
    "data: order, loading": (1278, "parallel/data/"),
    "reference models": (341, "parallel/models/"),
    "simulator: federation in virtual time": (4100, "simulations/ simulations/federation/"),
    "simulator: batched engine": (4320, "simulations/engines/batched/"),
    "simulator: other engines": (3152, "simulations/engines/"),
    "simulator: devices": (849, "simulations/devices/"),
    "simulator: populations": (1905, "simulations/populations/ atoll/cli/experiments/population"),
    "simulator: attacks": (754, "simulations/attacks/"),
    "sweep, compare, report": (
        4356,
        "simulations/experiments/ atoll/cli/experiments/ atoll/interface/sweeps atoll/interface/comparisons "
        "atoll/operations/sweep atoll/operations/compare",
    ),
    "fault histories and referee (tests now)": (5595, "simulations/histories/ simulations/referee/"),
    "readers of public data, tables, teaching (not shipped now)": (
        2521,
        "parallel/data/public/ parallel/communication/by_hand/ parallel/communication/horovod "
        "simulations/experiments/tables/ atoll/cli/docs atoll/cli/python_reference",
    ),
    "identity: authority, enrolment, roles": (
        5872,
        "protocol/identity/ server/identity/ atoll/cli/members/ client/disk/verifier client/disk/seen_store "
        "client/session/rollback_rules",
    ),
    "audit log": (
        2313,
        "protocol/audit/ server/audit/ atoll/cli/members/audit atoll/operations/local_audit client/notices",
    ),
    "a site's policy": (1661, "client/policy/ atoll/cli/members/site protocol/disclosure"),
    "backup and restore": (1047, "server/backup/ atoll/cli/serving/backups"),
    "aggregation ranks": (
        3152,
        "server/ranks/ server/services/aggregation_ aggregation/fold/sharded aggregation/fold/exchange "
        "client/wire/ranks atoll/cli/serving/aggregator atoll/cli/runs/ranks server/journal/placement",
    ),
    "journal and state directory": (2294, "server/journal/ server/following/"),
    "PostgreSQL": (461, "server/journal/postgres server/config/database_url"),
    "rounds and selection": (4920, "server/members/ server/rounds/ server/selection/"),
    "hosting of runs": (5350, "server/ server/hosting/"),
    "files, transfers, transport": (3553, "server/transfers/ server/transport/ server/files/ server/folding/"),
    "settings": (
        2569,
        "server/config/ protocol/settings protocol/variants protocol/attribute_docs atoll/cli/settings "
        "atoll/cli/sections",
    ),
    "views of runs, log lines": (
        2946,
        "server/views/ atoll/cli/runs/ atoll/interface/following atoll/operations/views",
    ),
    "notices to an operator": (1018, "protocol/notices/ server/hosting/notices atoll/cli/serving/notify"),
    "drills": (0, "atoll/drills/ atoll/cli/chaos"),
    "exports to trackers": (1816, "atoll/exports/ atoll/cli/exports/"),
    "metrics and traces": (0, "atoll/telemetry/"),
    "codecs": (1062, "tensors/codecs/ aggregation/codecs/"),
    "tensors and updates in files": (2198, "tensors/"),
    "fold": (2077, "aggregation/"),
    "robust rules": (893, "aggregation/rules/"),
    "client: session, wire, disk": (5367, "client/"),
    "protocol": (2826, "protocol/ ground/"),
    "operations and Python interface": (2993, "atoll/ atoll/interface/ atoll/operations/"),
    "dashboard": (0, "atoll/dashboard/ atoll/interface/places atoll/cli/dashboard"),
    "command line": (1665, "atoll/cli/"),
}
"""Each capability with its lines before and the prefixes of its paths."""


_PREFIXES = [(prefix, name) for name, (_, prefixes) in CAPABILITIES.items() for prefix in prefixes.split()]


def capability_of(path: str) -> str:
    """Return the capability of a file."""
    return max((len(prefix), name) for prefix, name in _PREFIXES if path.startswith(prefix))[1]


def table(modules: Iterable[Module]) -> str:
    """Return the lines before and now of each room and capability, as a text."""
    rooms, capabilities = Counter[str](), Counter[str]()
    for module in modules:
        rooms[module.room] += module.lines
        capabilities[capability_of(module.path)] += module.lines
    before = {name: lines for name, (lines, _) in CAPABILITIES.items()}
    parts = [("room", ROOMS_BEFORE, rooms), ("capability", before, capabilities)]
    return "\n\n".join("\n".join(_rows(*part)) for part in parts) + "\n"


def _rows(kind: str, before: Mapping[str, int], now: Mapping[str, int]) -> Iterator[str]:
    yield f"{'before':>7} {'now':>7}  {kind}"
    for name in sorted({*before, *now}, key=lambda name: -now.get(name, 0)):
        yield f"{before.get(name, 0):7,} {now.get(name, 0):7,}  {name}"
    yield f"{sum(before.values()):7,} {sum(now.values()):7,}  all"
