"""Models of Hugging Face along tp and pp, whole or with PEFT's LoRA: as the plain loop, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atoll.parallel.engine.assemble import assemble, check_model
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.blueprint import blueprint_of
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.sharding import whole
from tests.later import later
from tests.parallel.engine import reference
from tests.parallel.engine.cases import mine, plan
from tests.parallel.engine.families import Logits, lora, of_family, of_kind
from tests.parallel.engine.reference import Trace
from tests.parallel.ranks import call_on_ranks
from tests.turns import in_turn

peft = later("peft")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SEQUENCE = 6


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama, whole": lambda: of_family("Llama"),
    "llama, whole, a word that is never trained": lambda: of_family("Llama", pad_token_id=3),
    "llama, whole, tied": lambda: of_family("Llama", tie_word_embeddings=True),
    "llama, tied, a word that is never trained": lambda: of_family("Llama", tie_word_embeddings=True, pad_token_id=3),
    "llama, lora of all layers": lambda: lora(of_family("Llama"), use_rslora=True),
    "llama, lora of the head": lambda: lora(of_family("Llama"), "lm_head", "o_proj"),
    "qwen 2, lora with biases, tied, odd words": lambda: lora(
        of_family("Qwen2", vocab=33, tie_word_embeddings=True), bias="all"
    ),
    "qwen 3, lora beside norms of heads": lambda: lora(of_family("Qwen3", head_dim=8), "k_proj", "down_proj"),
    "phi 3, whole": lambda: of_family("Phi3"),
    "phi 3, lora": lambda: lora(of_family("Phi3"), lora_bias=True, bias="none"),
    "gemma, whole, tied, scaled words": lambda: of_family("Gemma", head_dim=8),
}


OF_STAGES: dict[str, Callable[[], nn.Module]] = {
    **MODELS,
    "gemma 2, which caps the logits": lambda: of_family("Gemma2", head_dim=8),
    "granite, which scales words and logits": lambda: of_family(
        "Granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5
    ),
    "mixtral, experts": lambda: of_family("Mixtral", num_local_experts=4),
    "lora of experts' attention": lambda: lora(of_family("Mixtral", num_local_experts=4), "q_proj"),
    "phi, a bias in the head": lambda: of_family("Phi"),
    "dora": lambda: lora(of_family("Llama"), "q_proj", use_dora=True),
    "gpt 2, tied": lambda: of_kind("GPT2LMHeadModel"),
    "gpt 2, classes": lambda: of_kind("GPT2ForSequenceClassification", num_labels=32),
    "gpt 2, lora": lambda: lora(of_kind("GPT2LMHeadModel"), "c_attn", "c_proj", fan_in_fan_out=True),
    "bert, masked words": lambda: of_kind("BertForMaskedLM"),
    "roberta, classes": lambda: of_kind("RobertaForSequenceClassification", num_labels=32),
    "bloom, layers that give tuples": lambda: of_kind("BloomForCausalLM"),
    "opt": lambda: of_kind("OPTForCausalLM"),
}


def batches() -> list[tuple[Any, Any]]:
    return reference.token_batches(32, SEQUENCE)


def trained_on_ranks(names: list[str], layout: Plan) -> list[Trace]:
    """What this rank has of each model after its training."""
    axes, found = Axes(layout.mesh, "cpu"), []
    for name in names:
        optimization = Optimization(
            loss=reference.token_loss, make_optimizer=lambda named: reference.make_optimizer("sgd", named)
        )
        engine = assemble(Logits(OF_STAGES[name]()), layout, optimization, axes=axes)
        measured = [engine.step(mine(inputs, targets, axes)) for inputs, targets in batches()]
        parameters = {
            of: whole(p.detach()).clone()
            for part in engine.parts
            for of, p in part.named_parameters(remove_duplicate=False)
        }
        norms = [float(of.grad_norm) for of in measured if of.grad_norm is not None]
        found.append(Trace([float(of.loss) for of in measured], norms, parameters, {}))
    return found


@pytest.mark.real
@pytest.mark.parametrize(
    "layout",
    [
        in_turn(plan(tp=2), number=0, days=2, id="tp 2"),
        in_turn(plan(pp=2), number=1, days=2, id="pp 2"),
        pytest.param(plan(pp=2, schedule="interleaved-1f1b"), id="pp 2, interleaved", marks=pytest.mark.long),
        pytest.param(plan(pp=2, dp_shard=2, zero=3), id="pp x fsdp 2x2", marks=pytest.mark.long),
        pytest.param(plan(pp=2, tp=2), id="pp x tp 2x2", marks=pytest.mark.long),
        pytest.param(plan(dp_shard=2, tp=2, zero=3), id="fsdp x tp 2x2", marks=pytest.mark.long),
    ],
)
def test_models_of_transformers_train_on_ranks_as_in_one_process(layout: Plan) -> None:
    models = MODELS if layout.mesh.tp > 1 else OF_STAGES
    if layout.num_stages > 2:  # each has something to train
        models = {
            name: make for name, make in models.items() if name.startswith(("llama, whole", "gemma", "gr", "gpt 2, t"))
        }
    of_ranks = call_on_ranks(trained_on_ranks, layout.mesh.size, list(models), layout, timeout_s=500)
    for at, (name, make) in enumerate(models.items()):
        expected = reference.plain_training(Logits(make()), reference.token_loss, batches(), "sgd")
        for trace in (traces[at] for traces in of_ranks):
            assert trace.losses == pytest.approx(expected.losses, abs=5e-6), name
            assert trace.norms == pytest.approx(expected.norms, rel=2e-6), name
            assert trace.parameters.keys() <= expected.parameters.keys()
            for of, value in trace.parameters.items():
                assert torch.allclose(value, expected.parameters[of], rtol=0, atol=1e-6), (name, of)
        assert {of for traces in of_ranks for of in traces[at].parameters} == expected.parameters.keys()


def test_the_factors_of_lora_are_cut_with_the_layer_under_them() -> None:
    declared = blueprint_of(Logits(lora(of_family("Llama"), "q_proj", "o_proj"))).tensor
    assert declared is not None
    layer = "inner.base_model.model.model.layers.1.self_attn"
    kinds = {name.removeprefix(f"{layer}."): type(style).__name__ for name, style in declared(True, True).items()}
    assert {name: kind for name, kind in kinds.items() if name.startswith(("q_proj", "o_proj"))} == {
        "q_proj.base_layer": "ColwiseParallel",
        "q_proj.lora_B.default": "ColwiseParallel",
        "o_proj.base_layer": "RowwiseParallel",
        "o_proj.lora_A.default": "RowwiseParallel",
    }


def adapted(config: Any) -> nn.Module:
    model: nn.Module = peft.get_peft_model(of_family("Llama"), config)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dora": (lambda: lora(of_family("Llama"), "q_proj", use_dora=True), r"q_proj and 1 other layer: .*variant Dora; "),
    "alora": (lambda: lora(of_family("Llama"), "q_proj", alora_invocation_tokens=[1]), r"got its variant ALora; "),
    "words": (lambda: lora(of_family("Llama"), "embed_tokens"), r"embed_tokens: .*got Embedding \(peft\.tuners\.lora"),
    "saved": (lambda: lora(of_family("Llama"), "q_proj", modules_to_save=["lm_head"]), "got ModulesToSaveWrapper "),
    "tokens": (lambda: lora(of_family("Llama"), "q_proj", trainable_token_indices=[1]), "got TrainableTokensLayer "),
    "parameters": (
        lambda: lora(of_family("Llama"), "k_proj", target_parameters=["q_proj.weight"]),
        "got ParamWrapper ",
    ),
    "ia3": (
        lambda: adapted(peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
        r"got IA3; leave it out of PEFT's config, or use tp=1 \(dp_shard divides all adapters\)",
    ),
    "loha": (lambda: adapted(peft.LoHaConfig(target_modules=["q_proj"])), "got LOHA; "),
    "prompts": (
        lambda: adapted(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        "got PROMPT_TUNING; ",
    ),
    "experts": (
        lambda: of_family("Mixtral"),
        "experts and 1 other layer: transformers' plan .*'moe_tp_experts', which",
    ),
    "norms of heads": (lambda: of_family("Qwen3", head_dim=8), "q_norm and 3 other layers: .*freeze them, or tp=1"),
    "heads": (lambda: of_family("Llama", num_key_value_heads=1), "tp=2 must divide num_key_value_heads=1"),
    "features": (lambda: of_family("Llama", intermediate_size=25), "tp=2 must divide features of gate_proj=25"),
    "no plan": (
        lambda: of_kind("GPT2LMHeadModel"),
        "GPT2LMHeadModel declares no blueprint.tensor, so it cannot be sharded; declare it, or use tp=1",
    ),
}


def check_refused(make: Callable[[], nn.Module], told: str, mesh: Mesh) -> None:
    model = make()
    with pytest.raises(ValueError, match=told):
        check_model(model, Plan(mesh=mesh))
    check_model(model, Plan(mesh=Mesh(dp_shard=2)))


@pytest.mark.parametrize("name", REFUSED)
def test_what_tp_cannot_divide_is_refused_before_anything_runs(name: str) -> None:
    check_refused(*REFUSED[name], Mesh(tp=2))


def outputs_on_ranks(layout: Plan) -> list[str]:
    """The outputs that the loss and the evaluation of a model of transformers see on this rank, by their class."""
    axes, seen = Axes(layout.mesh, "cpu"), []

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        seen.append(type(outputs).__name__)
        return reference.token_loss(outputs.logits, targets)

    optimization = Optimization(loss=loss, make_optimizer=lambda named: reference.make_optimizer("sgd", named))
    engine = assemble(of_family("Llama", use_cache=True), layout, optimization, axes=axes)
    ((inputs, targets), *_) = batches()
    engine.step(mine(inputs, targets, axes))
    engine.evaluate(mine(inputs, targets, axes), lambda outputs, *_: seen.append(f"{outputs.logits.shape[1]} words"))
    return seen


@pytest.mark.real
def test_the_loss_of_a_pipeline_sees_the_models_own_outputs() -> None:
    layout = plan(pp=2)
    first, last = call_on_ranks(outputs_on_ranks, 2, layout, timeout_s=500)
    assert first == []
    assert set(last) == {"CausalLMOutputWithPast", f"{SEQUENCE} words"}


class Skips(nn.Module):
    """A model of one's own around a Llama, whose outputs need its words, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = of_family("Llama")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words = self.inner.get_input_embeddings()(tokens)
        logits: torch.Tensor = self.inner(inputs_embeds=words).logits
        return logits + words.sum()


class Shifts(nn.Module):
    """A parameter in front of a Llama, beside a table that is no state: no stage may keep it for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shift = of_family("Llama"), nn.Parameter(torch.zeros(()))
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(tokens).logits
        return logits + self.shift


class Beside(nn.Module):
    """The same, one module further in."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Shifts()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens)
        return logits


WITHOUT_STAGES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "two lists": (
        lambda: of_kind("T5ForConditionalGeneration"),
        "a pipeline needs a chain, and T5ForConditionalGeneration has none: a single list of layers, and all other",
    ),
    "words again": (
        Skips,
        "Skips computes its outputs from more than that of inner.lm_head, which later",
    ),
    "a weight beside the chain": (Beside, r"and Beside \(around LlamaForCausalLM\) has none: .* all other state in"),
    "prompts": (
        REFUSED["prompts"][0],
        r"PeftModelForCausalLM cannot be followed without its modules",
    ),
    "routers": (
        lambda: of_family("Mixtral", num_local_experts=4, output_router_logits=True),
        "MixtralForCausalLM returns router_logits, which no single stage has",
    ),
    "hidden values": (
        lambda: of_family("Llama", output_hidden_states=True),
        "LlamaForCausalLM returns hidden_states, which no single stage has; use pp=1",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_STAGES)
def test_what_a_pipeline_cannot_compute_is_refused_before_anything_runs(name: str) -> None:
    check_refused(*WITHOUT_STAGES[name], Mesh(pp=2))


def test_the_chain_of_a_model_on_meta_is_checked_without_its_weights() -> None:
    with torch.device("meta"):
        model = Logits(lora(of_family("Gemma2", head_dim=8)))
    check_model(model, Plan(mesh=Mesh(pp=2)))
    assert next(model.parameters()).is_meta
