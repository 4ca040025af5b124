import random
from dataclasses import replace

import pytest
import torch

from atoll.parallel.engine.assemble import check_model
from atoll.parallel.engine.blueprint import cut
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.models.decoder import Decoder
from atoll.parallel.planner.candidate import stages, stages_of
from atoll.parallel.planner.dry_run import decoder_config
from atoll.parallel.planner.shape import MODELS, ModelShape, as_decoder


@pytest.mark.parametrize(
    ("name", "vocab", "parameters"),
    [
        ("gpt2-xl", 50257, 1_557_611_200),  # what the published checkpoints hold
        ("gpt2", 50257, 124_439_808),
        ("llama-8b", 128256, 8_030_261_248),
        ("llama-70b", 128256, 70_553_706_496),
        ("llama-405b", 128256, 405_853_388_800),
        ("qwen2.5-0.5b", 151936, 494_032_768),
        ("qwen2.5-7b", 152064, 7_615_616_512),
        ("qwen2.5-72b", 152064, 72_706_203_648),
        ("llama-1b", 128256, 1_235_814_400),
        ("bert-large", 30522, 335_141_888 - 1024 * 1025),  # without its pooler
    ],
)
def test_the_models_have_the_parameters_of_their_checkpoints(name: str, vocab: int, parameters: int) -> None:
    assert replace(MODELS[name], vocab=vocab).parameters == parameters


@pytest.mark.parametrize("name", ["turing-nlg", "gpt3"])
def test_the_largest_models_have_the_size_under_which_papers_list_them(name: str) -> None:
    assert MODELS[name].parameters == pytest.approx(MODELS[name].nominal, rel=3e-3)


def drawn(seed: int) -> ModelShape:
    draw = random.Random(seed)
    heads = draw.choice((2, 4, 6))
    return ModelShape(
        layers=draw.randint(1, 5),
        hidden=heads * 2 * draw.randint(2, 9),
        heads=heads,
        kv_heads=draw.choice((None, 2)),
        ffn=draw.choice((None, draw.randint(8, 90))),
        vocab=draw.randint(3, 200),
        sequence=16,
        tied=draw.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_shape_counts_the_parameters_of_the_decoder_that_it_names(seed: int) -> None:
    shape = drawn(seed)
    with torch.device("meta"):
        decoder = Decoder(decoder_config(shape))
    assert sum(parameter.numel() for parameter in decoder.parameters()) == shape.parameters


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_are_those_that_the_engine_cuts(seed: int, num_stages: int) -> None:
    shape = replace(drawn(seed), layers=7)
    with torch.device("meta"):
        found = cut(Decoder(decoder_config(shape)), num_stages)
    assert [stage.num_blocks for stage in stages(shape, num_stages)] == [
        sum(piece.startswith("layers.") for piece in names) for names in found
    ]
    assert [stage.has_head for stage in stages(shape, num_stages)] == ["head" in names for names in found]
    assert [stage.has_embedding for stage in stages(shape, num_stages)] == ["embed" in names for names in found]


def test_a_v_shaped_schedule_goes_down_the_ranks_and_back() -> None:
    plan = Plan(mesh=Mesh(pp=3), schedule="zbv-zero-bubble", num_microbatches=6)
    assert [stages_of(plan, rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_operations_are_counted_as_the_literature_does() -> None:
    """6 for each parameter of a matrix and 12 L h s for attention; torchtitan's 57.9 GFLOP a token of Llama 3.1 8B."""
    assert MODELS["llama-8b"].flops(1) == pytest.approx(57.9e9, rel=2e-3)
    assert MODELS["llama-8b"].flops(10, recompute=True) == pytest.approx(10 * 57.9e9 * 4 / 3, rel=2e-3)


def test_another_model_s_decoder_has_its_sizes() -> None:
    decoder = as_decoder(MODELS["gpt3"])
    assert (decoder.layers, decoder.hidden, decoder.width, decoder.vocab) == (96, 12288, 8 * 12288 // 3, 50304)
    assert decoder.parameters == pytest.approx(MODELS["gpt3"].parameters, rel=1e-3)
    assert as_decoder(MODELS["llama-8b"]) == MODELS["llama-8b"]
    with torch.device("meta"):
        check_model(Decoder(decoder_config(replace(decoder, layers=1))), Plan(mesh=Mesh(tp=4)))
    with pytest.raises(ValueError, match="Llama-style"):
        decoder_config(MODELS["gpt3"])


def test_every_fault_of_a_shape_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"layers: must be a whole number >= 1, got 0\nmodel.vocab: .* got 2.5"):
        ModelShape(layers=0, hidden=8, heads=2, vocab=2.5)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"heads: must divide hidden=10, got 3\n.*kv_heads: .*got 2\n.*mlp: .*got 'relu'"
    ):
        ModelShape(layers=1, hidden=10, heads=3, kv_heads=2, vocab=5, mlp="relu")
