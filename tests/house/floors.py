"""The house from ground to top: which room may import which, and the floors of the folders inside each room.

A module imports from its own place, from places on lower floors of its room, and from lower rooms. A place is one
folder (without the folders below it, which are separate places), or one file where the files of a folder belong to
different floors; the files in a room's root are always named singly. Places on one floor do not import each other. A
folder or a root file that is missing in the table is a violation, so that a new one takes its place here.
`python -m tests.house --propose ROOM` prints the lowest floors that the imports of a room allow.
"""

LOWEST = {"ground", "plugins", "tensors"}
TRAINING = LOWEST | {"task", "training"}
WITHOUT_SHELL = TRAINING | {"flower", "parallel", "aggregation"}
"""Mathematics and training: no gRPC, no asyncio, no wall clock."""
BOTH_SIDES = TRAINING | {"parallel", "aggregation", "protocol"}

MAY_IMPORT = {
    "ground": {"ground"},
    "plugins": {"ground", "plugins"},
    "tensors": LOWEST,
    "aggregation": LOWEST | {"aggregation"},
    "task": LOWEST | {"task"},
    "training": TRAINING,
    "flower": TRAINING | {"flower"},
    "parallel": TRAINING | {"parallel"},
    "protocol": BOTH_SIDES,
    "server": BOTH_SIDES | {"server"},
    "client": BOTH_SIDES | {"client"},
    "simulations": BOTH_SIDES | {"server", "client", "simulations"},
    "atoll": BOTH_SIDES | {"server", "client", "simulations", "flower", "atoll"},
}
"""The rooms that each room may import."""

TESTS_ELSEWHERE = {
    "atoll/cli/flower": "tests/federation/flower",
    "atoll/cli/project": "tests/cli/test_new.py",
    "server/services": "tests/wire",
    "server/transfers": "tests/wire",
}
"""Folders whose tests lie elsewhere: what they do is seen through a socket, a process or a whole history."""

APART = {"atoll/cli", "atoll/interface"}
"""Folders with all below them that do not import each other on any floor; both stand on `atoll/operations`."""

FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "flower": (
        ("app.py", "measured.py", "records.py", "secret_noise.py"),
        ("client_host.py", "exported", "server_host.py"),
        ("hosted", "native"),
        ("bench.py",),
        ("framework.py", "task.py"),
    ),
    "training": (
        ("base", "optimizers"),
        ("model",),
        ("data",),
        ("statistics", "trials"),
        ("local",),
        ("worker",),
    ),
    "task": (
        (
            "deadline.py",
            "eager.py",
            "errors.py",
            "json_text.py",
            "noise.py",
            "overrides.py",
            "statistic.py",
            "told.py",
        ),
        ("arrays.py", "collated.py", "context.py", "local.py", "metrics.py", "round_schedule.py"),
        ("algorithm.py", "apps.py", "array_task.py", "base.py", "content.py", "given.py"),
        ("task.py",),
        ("array_values.py", "randomness.py"),
        ("programs",),
    ),
    "ground": (
        ("backoff.py", "bounded_mapping.py", "file_lock.py", "folders.py", "noise", "printable.py", "text_files.py"),
        ("durable.py", "file_digest.py", "process", "strict_json.py"),
        ("folder_id.py",),
    ),
    "plugins": (
        ("entry_points.py", "guard.py", "place.py", "reference.py"),
        ("kind.py",),
    ),
    "tensors": (
        ("layout.py", "numba_support.py"),
        ("coverage.py", "pieces.py", "runs.py", "safetensors_header.py"),
        ("box_reader.py", "ownership.py", "safetensors_file.py"),
        ("codecs", "shared_file.py"),
        ("updates",),
    ),
    "aggregation": (
        ("optimizers.py", "ordered_map.py"),
        ("custom_optimizer.py", "rules"),
        ("fold",),
        ("stacked",),
    ),
    "parallel": (
        ("checkpoint", "communication", "data", "huggingface", "world.py"),
        ("engine",),
        ("exchange", "launch", "mesh_client/hooks.py", "models"),
        ("mesh_client/supervisor", "planner", "trials"),
        ("trainer",),
        ("mesh_client",),
    ),
    "protocol": (
        (
            "attribute_docs.py",
            "audit",
            "build.py",
            "disclosure.py",
            "displaced.py",
            "json_values.py",
            "log_fields.py",
            "progress.py",
            "run_names.py",
            "secrets.py",
            "service_manager.py",
            "site_statistics.py",
            "threads.py",
            "value_type.py",
            "variants.py",
            "vocabulary.py",
        ),
        ("services.py", "settings.py", "signals.py"),
        ("notices", "wire"),
        ("identity", "manifest.py"),
        ("manifest_limits.py", "part_manifest.py"),
    ),
    "server": (
        ("clock.py", "errors.py", "process_tuning.py"),
        ("rounds", "statistics"),
        ("exchanges", "names", "parts", "selection", "transport"),
        ("audit", "config"),
        ("journal",),
        ("files", "identity"),
        ("folding", "programs", "transfers", "views"),
        ("following", "ranks", "required"),
        ("hosting",),
        ("backup", "services"),
        ("ports.py",),
        ("process.py",),
    ),
    "client": (
        ("crew_config.py", "session"),
        ("config.py", "disk"),
        ("policy",),
        ("wire",),
        ("work",),
        ("notices.py",),
        ("agent.py",),
        ("process.py",),
    ),
    "simulations": (
        ("attacks", "devices", "engines", "populations"),
        ("engines/batched",),
        ("engines/processes",),
        ("engines/choice.py",),
        ("federation",),
        ("experiments", "messages"),
    ),
    "atoll": (
        ("cli/project", "exports"),
        ("operations",),
        ("operations/training",),
        ("operations/compare.py",),
        ("cli", "cli/command.py", "cli/log.py", "cli/sections.py", "interface"),
        ("cli/printing.py", "cli/progress.py"),
        ("cli/completion.py", "cli/waiting.py"),
        ("cli/group.py", "cli/options.py"),
        ("cli/new.py", "cli/plugins.py", "cli/requested.py", "cli/settings.py"),
        ("cli/runs", "cli/serving"),
        ("cli/exports",),
        ("cli/training",),
        ("cli/experiments", "cli/members"),
        ("cli/flower",),
        ("cli/commands.py",),
        ("__init__.py", "cli/main.py"),
        ("__main__.py",),
    ),
}
"""The floors of each room, lowest first; folders and files relative to the room."""
