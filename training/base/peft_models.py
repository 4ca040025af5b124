"""Models of PEFT: the note on an adapter that a version carries, so that it is exported without the task.

PEFT saves the tensors of an adapter under their names in the model, without the name of the adapter:

    base_model.model.q_proj.lora_A.default.weight             base_model.model.q_proj.lora_A.weight
    base_model.model.lm_head.modules_to_save.default.weight   base_model.model.lm_head.weight

The note is made with PEFT's functions, and says so if they name a model's tensors by another rule.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from atoll.training.base.peft_files import Adapter, peft_name


def adapter_of(model: torch.nn.Module, travelling: Iterable[str]) -> Adapter | None:
    """Return the note on the active adapter of a model that is or contains a `PeftModel`, or None.

    Args:
        model: the model of the task.
        travelling: the names of its tensors that are exchanged.
    """
    found = _peft_model(model)
    if found is None:
        return None
    from peft import get_peft_model_state_dict

    prefix, inner = found
    name = inner.active_adapter
    saved = get_peft_model_state_dict(inner, adapter_name=name, save_embedding_layers=False).keys()
    names = {key: peft_name(key.removeprefix(prefix), name) for key in model.state_dict() if key.startswith(prefix)}
    of_adapter = {key: stored for key, stored in names.items() if stored in saved}
    travels = set(travelling)
    return Adapter(
        name=name,
        prefix=prefix,
        config=_config_of(inner, name),
        frozen=sorted(of_adapter.keys() - travels),
        elsewhere=sorted(travels - of_adapter.keys()),
        unknown=sorted(saved - of_adapter.values()),
    )


def note_of(adapter: Adapter | None) -> str:
    """Return the text of a note for the header of a version's file; empty: there is no adapter."""
    return "" if adapter is None else json.dumps(asdict(adapter), sort_keys=True)


def adapter_faults(model: torch.nn.Module) -> list[str]:
    """Return the reasons why a model's adapters cannot be trained: one over a tied tensor changes two layers.

    With PEFT's `ensure_weight_tying` the adapters are tied, too.
    """
    found = _peft_model(model)
    if found is None or getattr(found[1].peft_config[found[1].active_adapter], "ensure_weight_tying", False):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    return [
        f"{name}: an adapter over a tied tensor ({', '.join(tied)}): merged, it would change them all; leave it out of "
        "target_modules, or set ensure_weight_tying=True in PEFT's config"
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
        and isinstance(weight := getattr(module.get_base_layer(), "weight", None), torch.nn.Parameter)
        and len(tied := places.get(id(weight), [])) > 1
    ]


def base_faults(model: torch.nn.Module) -> list[str]:
    """Return the reasons why an adapter cannot have a `Base`: its first values are computed from the base's."""
    found = _peft_model(model)
    if found is None:
        return []
    config = found[1].peft_config[found[1].active_adapter]
    settings = {"use_dora": (None, False), "init_lora_weights": (None, True, False, "gaussian", "orthogonal")}
    return [
        f"{name}={value!r}: the adapter begins with values made from the base's weights, and a Base is read later than "
        "that; let task.model read the weights (from_pretrained), without Task(base=...)"
        for name, allowed in settings.items()
        if (value := getattr(config, name, None)) not in allowed
    ]


def freeze_a(model: torch.nn.Module) -> torch.nn.Module:
    """Freeze the factors A of all LoRA adapters of a model, in place, and return it: only B is trained (FFA-LoRA).

    The mean of B_i A over the sites is then the product of the mean of B_i with A, and half the bytes are sent. A is
    drawn from the seed of the run, the same at every site.

    Source:
        Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024.
    """
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_embedding_A." in name:
            parameter.requires_grad_(False)
    return model


def _peft_model(model: torch.nn.Module) -> tuple[str, Any] | None:
    """Find the `PeftModel` in a model; return the prefix of its names and it. Only the model's code imports PEFT."""
    if (peft := sys.modules.get("peft")) is None:
        return None
    for name, module in model.named_modules():
        if isinstance(module, peft.PeftModel):
            return (f"{name}." if name else ""), module
    return None


def _config_of(model: Any, name: str) -> dict[str, Any]:
    """Return the adapter's configuration as PEFT saves it, sets in order."""
    config = copy.deepcopy(model.peft_config[name])
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        (file,) = Path(folder).glob("*.json")
        saved: dict[str, Any] = json.loads(file.read_text("utf-8"))
    unordered = {key for key, value in vars(config).items() if isinstance(value, set)}
    return {key: sorted(value) if key in unordered else value for key, value in saved.items()}
