"""Models of Hugging Face as they are, small ones made from a configuration: no weights are fetched."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from atoll import Task
from tests.odd_tasks.tasks.base import CLASSES, of_rows

F = nn.functional
WORDS, LENGTH, WIDTH = 24, 7, 16
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EAGER = {"attn_implementation": "eager"}


def made(name: str, of: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a function that makes a model of transformers, which is imported by the sites that train it alone."""

    def model() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{of}Config")(**settings, **EAGER)
        return getattr(transformers, name)(config)

    return model


def words(inputs: torch.Tensor) -> torch.Tensor:
    """Return each row of features as words (n, 7)."""
    turns = torch.arange(LENGTH)
    return (inputs.abs() * 7).long()[:, turns % inputs.shape[1]].add(turns).remainder(WORDS)


def texts(inputs: torch.Tensor, _: torch.Tensor) -> list[Any]:
    """Return rows whose targets are their own words, the first two of which are a prompt without a loss."""
    labels = words(inputs).clone()
    labels[:, :2] = -100
    return list(zip(words(inputs), labels, strict=True))


def next_word(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each next word, with the labels shifted here."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def causal(model: Callable[[], nn.Module]) -> Task:
    return of_rows(texts, model=model, loss=next_word, units=lambda labels: (labels[:, 1:] != -100).sum())


def of_class(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, targets)


def images(inputs: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    pictures = inputs.repeat(1, 32)[:, : 3 * 8 * 8].reshape(-1, 3, 8, 8)
    return list(zip(pictures, targets, strict=True))


gpt2 = causal(
    made(
        *("GPT2LMHeadModel", "GPT2"),
        **{"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 2},
        **{
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "use_cache": False,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    )
)
llama = causal(made("LlamaForCausalLM", "Llama", vocab_size=WORDS, num_key_value_heads=1, use_cache=False, **SIZES))
mixtral = causal(
    made(
        *("MixtralForCausalLM", "Mixtral"),
        **{"vocab_size": WORDS, "num_key_value_heads": 1, "use_cache": False, "num_local_experts": 4, **SIZES},
    )
)
bert = of_rows(
    lambda inputs, targets: list(zip(words(inputs), targets, strict=True)),
    model=made(
        *("BertForSequenceClassification", "Bert"),
        **{"vocab_size": WORDS, "max_position_embeddings": LENGTH, "num_labels": CLASSES, **SIZES, **NO_DROPOUT},
    ),
    loss=of_class,
)
vit = of_rows(
    images,
    model=made(
        *("ViTForImageClassification", "ViT"),
        **{"image_size": 8, "patch_size": 4, "num_labels": CLASSES, **SIZES, **NO_DROPOUT},
    ),
    loss=of_class,
)
