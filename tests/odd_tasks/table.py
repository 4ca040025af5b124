"""The odd tasks by name, and the ways in which they are refused, with a word of the sentence."""

from types import ModuleType
from typing import Any

from atoll import Task
from tests.odd_tasks.cells import CENTRAL, WAYS, Verdict, has_chain
from tests.odd_tasks.tasks import data, hugging_face, losses, made, models, outside, tensors, utilities

EVERYWHERE = (*WAYS, "agents")
SHARED = ("zero=3", "pp=2")
SIMULATED = ("sequential", "processes", "batched", "agents")


def _tasks(module: ModuleType) -> dict[str, tuple[str, Any]]:
    return {
        name: (f"{module.__name__}:{name}", value)
        for name, value in vars(module).items()
        if isinstance(value, Task | data.Means) and name != "plain"
    }


TASKS: dict[str, tuple[str, Any]] = {
    **_tasks(tensors),
    **_tasks(models),
    **_tasks(made),
    **_tasks(losses),
    **_tasks(data),
    **_tasks(hugging_face),
    **_tasks(outside),
    **_tasks(utilities),
}
"""Reference and task by name."""

REFUSED: dict[str, dict[tuple[str, ...], str]] = {
    "complex_buffer": {EVERYWHERE: "buffer is torch.complex64"},
    "float8_buffer": {EVERYWHERE: "buffer is torch.float8_e4m3fn"},
    "infinite_mask": {("pp=2",): "a pipeline needs a chain", EVERYWHERE: "persistent=False"},
    "beyond_float32": {("pp=2",): "a pipeline needs a chain", EVERYWHERE: "persistent=False"},
    "extra_state": {EVERYWHERE: "only tensors can be exchanged"},
    "shared_elements": {EVERYWHERE: "several elements share one place in memory"},
    "lazy_layer": {EVERYWHERE: "has no shape yet"},
    "bounded_embedding": {("dp=2", *SHARED): "max_norm=0.5 changes the weight"},
    "clamped": {("zero=3",): "forward changes them in place"},
    "frozen_layer": {("pp=2",): "1 layer (2) cannot fill 2 stages"},
    "weight_norm": {("pp=2",): "1 layer (0) cannot fill 2 stages"},
    "spectral_norm": {("pp=2",): "1 layer (0) cannot fill 2 stages"},
    "jit_scripted": {("dp=2", *SHARED): "compiled by torch.jit"},
    "checkpointed_reentrant": {("dp=2",): "set use_reentrant=False"},
    "tied_by_views": {SHARED: "are views of one memory"},
    "held_weights": {("zero=3",): "layers.0.weight, layers.2.weight: the model, the loss or a hook reads a parameter"},
    "odd_parameters": {("zero=3",): "nothing: no elements"},
    "all_frozen": {EVERYWHERE: "has no parameter to train"},
    "no_module": {EVERYWHERE: "must return a torch.nn.Module, got int"},
    "loss_and_weight": {EVERYWHERE: "a single number"},
    "loss_of_each": {EVERYWHERE: "a single number"},
    "loss_number": {EVERYWHERE: "a single number"},
    "loss_detached": {EVERYWHERE: "has no gradient"},
    "dict_rows_bare": {EVERYWHERE: "Task(collate=...)"},
    "triple_rows_bare": {EVERYWHERE: "Task(collate=...)"},
    "ragged_rows_bare": {EVERYWHERE: "Task(collate=...)"},
    "loader": {EVERYWHERE: "a DataLoader, which makes batches by itself"},
    "dict_of_columns": {EVERYWHERE: "a dict with the keys x, y, and rows have numbers"},
    "one_column": {EVERYWHERE: "got tuple of 1"},
    "late_parameter": {("pp=2",): "a pipeline needs a chain", EVERYWHERE: "made by the model's forward pass"},
    "late_buffer": {("pp=2",): "a pipeline needs a chain", EVERYWHERE: "registered by the model's forward pass"},
    "growing_buffer": {
        ("pp=2",): "a pipeline needs a chain",
        ("dp=2", "zero=3"): "queue: a pass leaves values there that depend on its examples",
        EVERYWHERE: "queue: its shape was (0, 3)",
    },
    "stream": {EVERYWHERE: "which has no"},
    "no_row": {("agents",): "the data set is empty; a site needs", SIMULATED: "site 'a' has no example to train on"},
    "running_sums": {("dp=2", "zero=3"): "each rank sees different ones"},
    "weight_in_the_loss": {
        ("zero=3",): "holds beside its module",
        ("pp=2",): "another stage of the pipeline, or the loss",
        ("sequential", "processes", "batched"): "must not hold a parameter of one model",
    },
    "arrays": {CENTRAL: "an ArrayTask, which trains with its own code"},
    "scikit_learn": {CENTRAL: "an ArrayTask, which trains with its own code"},
}
"""Words of the refusals by task and ways."""


BY_PASS = (
    "batch_norm",
    "spectral_norm",
    "byte_counter",
    "short_counter",
    "long_counter",
    "running_sums",
    "counting_passes",
)
"""Tasks whose forward pass depends on the rows that are in it, or counts passes: `plain.divided` is the right value."""


def refusal(name: str, way: str) -> str | None:
    """Return a word of the sentence with which a task is refused in a way; None: it must be equal."""
    for ways, word in REFUSED.get(name, {}).items():
        if way in ways:
            return word
    if way == "pp=2" and not has_chain(TASKS[name][1]):
        return "a pipeline needs a chain"
    return None


def wrong(name: str, way: str, verdict: Verdict) -> str | None:
    """Return what is wrong with a verdict, beside what the table expects; None: nothing."""
    word = refusal(name, way)
    if verdict.word == "refused" and word is not None:
        return None if word in verdict.sentence else f"refused for another reason: {verdict.sentence}"
    if verdict.word == "equal":
        return None if word is None else f"not refused, where the table says so ({word})"
    return verdict.sentence if verdict.word == "WRONG" else f"refused: {verdict.sentence}"
