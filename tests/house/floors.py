"""The house from ground to top: which room may import which, and the floors of the folders inside each room.

A module imports from its own place, from places on lower floors of its room, and from lower rooms. A place is one
folder (without the folders below it, which are separate places), or one file where the files of a folder belong to
different floors; the files in a room's root are always named singly. Places on one floor do not import each other. A
folder or a root file that is missing in the table is a violation, so that a new one takes its place here.
`python -m tests.house --propose ROOM` prints the lowest floors that the imports of a room allow.
"""

GROUND = {"aggregation", "parallel"}

MAY_IMPORT = {
    "aggregation": {"aggregation"},
    "parallel": {"parallel"},
    "protocol": {"protocol"} | GROUND,
    "server": {"server", "protocol"} | GROUND,
    "client": {"client", "protocol"} | GROUND,
    "simulations": {"simulations", "server", "client", "protocol"} | GROUND,
    "atoll": {"atoll", "simulations", "server", "client", "protocol"} | GROUND,
}
"""The rooms that each room may import."""

SHARED: dict[str, tuple[str, ...]] = {
    "parallel": (
        "aggregation/codecs/chunks.py",
        "aggregation/codecs/codec.py",
        "aggregation/codecs/error_feedback.py",
        "aggregation/codecs/names.py",
        "aggregation/entry_points.py",
        "aggregation/file_digest.py",
        "aggregation/folders.py",
        "aggregation/noise",
        "aggregation/printable.py",
        "aggregation/tensors",
        "aggregation/text_files.py",
        "aggregation/updates/encoded_writer.py",
        "aggregation/weight.py",
    ),
}
"""Places of other rooms that a room may import all the same: on the ground, the layout of tensors, their file and how
they are encoded there, the weight that an update claims, and the text that a person writes or reads."""

TESTS_ELSEWHERE = {
    "atoll/cli/flower": "tests/federation/flower",
    "atoll/cli/project": "tests/cli/test_new.py",
    "server/services": "tests/wire",
    "server/transfers": "tests/wire",
}
"""Folders whose tests lie elsewhere: what they do is seen through a socket, a process or a whole history."""

FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "aggregation": (
        (
            "entry_points.py",
            "folders.py",
            "noise",
            "numba_support.py",
            "ordered_map.py",
            "place.py",
            "printable.py",
            "text_files.py",
            "weight.py",
        ),
        ("file_digest.py", "optimizers.py"),
        ("own_optimizer.py",),
        ("tensors",),
        ("codecs",),
        ("updates",),
        ("rules",),
        ("fold",),
        ("stacked",),
    ),
    "parallel": (
        (
            "compiled.py",
            "dtensor.py",
            "exit_functions.py",
            "forking.py",
            "frozen.py",
            "heap.py",
            "loading.py",
            "log_streams.py",
        ),
        ("checkpoint", "optimizers", "task", "world.py"),
        ("adapters",),
        ("communication", "flower", "local_training"),
        ("statistics",),
        ("data", "programs", "worker"),
        ("engine",),
        ("exchange", "exported"),
        ("launch", "models", "trainer"),
        ("crew/supervisor", "planner"),
        ("crew",),
    ),
    "protocol": (
        (
            "attribute_docs.py",
            "backoff.py",
            "bounded_mapping.py",
            "build.py",
            "crash_points.py",
            "durable.py",
            "file_lock.py",
            "json_values.py",
            "log_fields.py",
            "progress.py",
            "run_names.py",
            "secrets.py",
            "service_manager.py",
            "threads.py",
        ),
        (
            "disclosure.py",
            "displaced.py",
            "folder_id.py",
            "signals.py",
            "strict_json.py",
            "value_type.py",
            "variants.py",
            "vocabulary.py",
        ),
        ("audit", "settings.py", "site_statistics.py"),
        ("notices", "reference.py", "wire"),
        ("identity", "manifest.py", "plugins.py"),
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
        (
            *("cli", "cli/printing.py", "cli/sections.py"),
            *("cli/shutdown_deadline.py", "cli/stopping.py"),
            "exports",
        ),
        ("cli/completion.py", "cli/faults.py", "cli/log.py", "cli/waiting.py"),
        ("cli/options.py", "cli/worker_check.py"),
        ("cli/flower_plan.py",),
        (
            "cli/files.py",
            "cli/local_audit.py",
            "cli/new.py",
            "cli/plugins.py",
            "cli/project",
            "cli/settings.py",
            "cli/task_failures.py",
            "cli/temporary.py",
        ),
        ("cli/runs", "cli/serving"),
        ("cli/exports",),
        ("cli/training",),
        ("cli/experiments", "cli/members"),
        ("cli/flower",),
        ("cli/commands.py", "interface"),
        ("__init__.py", "cli/main.py"),
        ("__main__.py",),
    ),
}
"""The floors of each room, lowest first; folders and files relative to the room."""
