"""Models of Hugging Face of many kinds, in stages: with the numbers and gradients of the whole, or refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atoll.parallel.engine.assemble import check_model
from atoll.parallel.engine.blueprint import cut, stage
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.huggingface.pipeline_stages import INPUTS, first_output
from tests.parallel.engine.families import KINDS, WORDS, Logits, Padded, of_family, of_kind

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

REFUSED = {
    "GPT2DoubleHeadsModel": "returns mc_logits, which no single stage has",
    "BertForPreTraining": "cannot be followed without its modules",
    "BertForQuestionAnswering": "returns end_logits, which no single stage has",
    "AlbertForMaskedLM": r"calls albert\.encoder\.albert_layer_groups\.0 more than once",
    "MPNetForMaskedLM": "cannot be followed without its modules",
    "RwkvForCausalLM": "returns state, which no single stage has",
    "T5EncoderModel": "does not call shared",
    "T5ForConditionalGeneration": "has none: a single list of layers",
    "BartForConditionalGeneration": "has none: a single list of layers",
}


def inputs_of(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return torch.rand(3, 3, 8, 8, generator=generator)
    return torch.randint(0, WORDS, (3, 7), generator=generator)  # with some of padding


def check_stages(model: nn.Module, inputs: torch.Tensor, num_stages: int) -> None:
    """Compare the outputs of the stages one after another, and the sums of their gradients, with the whole model's."""
    check_model(model, Plan(mesh=Mesh(pp=num_stages)))
    model, whole = copy.deepcopy(model), model  # the stages have the layers of the model
    hidden = inputs
    for part in [stage(model, names) for names in cut(model, num_stages)]:
        hidden = part(hidden, **{INPUTS: inputs})
    expected = first_output(whole(inputs))
    assert torch.equal(hidden, expected)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    for outputs in (hidden, expected):
        (outputs * weights).sum().backward()
    for name, parameter in whole.named_parameters():
        found = model.get_parameter(name).grad
        assert (found is None) == (parameter.grad is None), name
        if found is not None and parameter.grad is not None:
            assert torch.allclose(found, parameter.grad, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in REFUSED])
def test_stages_of_a_family_are_the_model(kind: str) -> None:
    model = of_kind(kind)
    for num_stages in (2, 3):
        check_stages(model, inputs_of(model), num_stages)
        model.zero_grad()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_stage_can_compute_of_a_family_is_refused_by_name(kind: str) -> None:
    model = of_kind(kind)
    with pytest.raises(ValueError, match=f"pp=2: .*{kind} {REFUSED[kind]}.*; use pp=1"):
        check_model(model, Plan(mesh=Mesh(pp=2)))
    check_model(model, Plan(mesh=Mesh(dp_shard=2)))


class Headed(nn.Module):
    """A head of one's own on a model that has none."""

    def __init__(self, of_what: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.head = of_kind("GPT2Model"), nn.Linear(16, 5)
        self.of_what = of_what

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.of_what(self.inner, tokens))
        return outputs


def test_a_head_of_ones_own_is_a_part_of_the_chain_and_may_look_at_the_words_again() -> None:
    model = Headed(lambda inner, tokens: inner(tokens).last_hidden_state + (tokens == 3)[..., None])
    check_stages(model, torch.randint(0, WORDS, (3, 7)), 3)
    assert cut(model, 2)[1][-2:] == ["inner.ln_f", "head"]


def skips(inner: Any, tokens: torch.Tensor) -> torch.Tensor:
    words = inner.wte(tokens)
    hidden: torch.Tensor = inner(inputs_embeds=words).last_hidden_state
    return hidden + words


def test_a_skip_over_the_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Headed computes what head takes from more than the output of inner\.ln_f"):
        check_model(Headed(skips), Plan(mesh=Mesh(pp=2)))


class Adds(nn.Module):
    """A model of one's own around the modules of GPT-2, which adds to what one of them returns, in place."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.inner, self.at = of_kind("GPT2Model"), at

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.inner.wte(tokens)
        for name in ("h.0", "h.1", "ln_f"):
            hidden = self.inner.get_submodule(name)(hidden)
            if name == self.at:
                hidden += 1
        return hidden


def adding(at: str) -> nn.Module:
    model = Adds(at)
    model.inner.wpe = None
    return model


def test_what_a_forward_changes_in_place_is_changed_once_or_refused() -> None:
    tokens = torch.randint(0, WORDS, (3, 7))
    assert [names[0] for names in cut(adding("ln_f"), 2)] == ["inner.wte", "inner.h.1"]
    check_stages(adding("ln_f"), tokens, 2)
    check_stages(adding("h.1"), tokens, 2)
    with pytest.raises(
        ValueError, match=r"Adds changes in place what inner\.h\.0 returns, with which a stage ends; use pp=1"
    ):
        check_model(adding("h.0"), Plan(mesh=Mesh(pp=2)))


def test_masks_of_padding_are_those_of_the_whole_model() -> None:
    for kind in ("GPT2LMHeadModel", "BertForMaskedLM"):
        check_stages(Padded(of_kind(kind)), inputs_of(of_kind(kind)), 2)
    check_stages(Padded(of_family("Llama")), torch.randint(0, 3, (3, 7)), 2)


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "GPT2ForTokenClassification"])
def test_a_dropout_after_the_layers_is_no_reason_to_refuse_and_no_number_is_drawn(kind: str) -> None:
    before = torch.get_rng_state()
    model = Logits(of_kind(kind, drops=True))
    torch.set_rng_state(before)
    check_model(model, Plan(mesh=Mesh(pp=2)))
    assert torch.equal(torch.get_rng_state(), before)
    check_stages(model.eval(), torch.randint(0, WORDS, (3, 7)), 2)
