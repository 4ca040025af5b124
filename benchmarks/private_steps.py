"""A private step (example gradients, clipping, noise, optimizer) beside the plain step of the same batch.

    python -m benchmarks.private_steps [--turns N]

Both sides train the same model on the same rows, in turns, on one thread; times are the processor's, and a ratio is the
median over the turns. The plain step is forward, backward and SGD. The private one is the step of `atoll train`: the
way to the example gradients that its trial chooses, the sum, the noise of each element, and SGD.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from operator import truediv
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from atoll.parallel.data.batch import Batch
from atoll.parallel.private.passes import PrivatePasses, SumsOfOne
from atoll.training.data.units import Units
from atoll.training.private.checks import FEW, Trial, choose
from benchmarks.report import Bar, conclude, say, spread

BARS = {"mlp": 10.0, "cnn": 2.0, "lora_llama": 1.5}
"""Largest ratio of each model."""
CLIP_NORM, NOISE = 1.0, 1.0

Case = tuple[str, nn.Module, Callable[[Any, Any], torch.Tensor], Units, torch.Tensor, torch.Tensor]


def cases() -> Iterator[Case]:
    """Yield name, model, loss, units, inputs and targets of each model."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    labels = torch.randint(0, 10, (64,))
    yield "mlp", mlp, functional.cross_entropy, Units(), torch.randn(64, 64), labels
    cnn = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 10)),
    )
    yield "cnn", cnn, functional.cross_entropy, Units(), torch.randn(64, 1, 28, 28), labels
    tokens = torch.randint(0, 256, (8, 48))
    targets = tokens.clone()
    for row, counted in enumerate((48, 5, 20, 2, 33, 48, 12, 9)):
        targets[row, counted:] = -100
    units = Units(lambda tokens: (tokens[:, 1:] != -100).sum())
    yield "lora_llama", _lora(), _of_tokens, units, tokens, targets


def _of_tokens(outputs: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    return functional.cross_entropy(logits, tokens[:, 1:].flatten(), ignore_index=-100)


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    model: nn.Module = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def milliseconds(case: Case, turns: int) -> tuple[list[float], list[float]]:
    """Return the times of private and of plain steps, in turns."""
    name, model, loss, units, inputs, targets = case
    model.train()
    few = Trial(model=model, loss=loss, units=units, inputs=inputs[:FEW], targets=targets[:FEW], rows=FEW)
    gradients, faults = choose(few, CLIP_NORM)
    assert gradients is not None, faults
    optimizer = torch.optim.SGD([*gradients.parameters.values()], lr=1e-6)
    evaluations: Any = None
    sums = SumsOfOne(gradients, at_once=len(inputs))
    passes = PrivatePasses(evaluations, sums, key=bytes(32), std=CLIP_NORM * NOISE, expected=len(inputs))
    batch = Batch(inputs, targets, 1.0, rows=len(inputs))

    def plain() -> None:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    def private() -> None:
        optimizer.zero_grad()
        passes.train(batch, lambda: 1)
        optimizer.step()

    repeats = max(1, round(0.05 / _seconds(plain, 3)))
    found = [(_seconds(private, repeats) * 1e3, _seconds(plain, repeats) * 1e3) for _ in range(turns)]
    ratio = median(one / other for one, other in found)
    say(f"{name}: {type(gradients).__name__}, {ratio:.2f} times a plain step")
    return [one for one, _ in found], [other for _, other in found]


def _seconds(step: Callable[[], None], repeats: int) -> float:
    begun = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - begun) / repeats


def main() -> int:
    """Measure, and print the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = {case[0]: milliseconds(case, turns) for case in cases()}
    bars = [
        Bar.at_most(f"{name}: a private step over a plain one", median(map(truediv, *found[name])), most)
        for name, most in BARS.items()
    ]
    private, plain = ({f"{name}_ms": spread(times[side], 3) for name, times in found.items()} for side in (0, 1))
    return conclude("private_steps", bars, ours=private, theirs=plain)


if __name__ == "__main__":
    raise SystemExit(main())
