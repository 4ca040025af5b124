import pytest

from atoll.parallel.planner.cluster import CLUSTERS, Cluster
from atoll.parallel.planner.shape import MODELS, ModelShape
from atoll.parallel.planner.spec import parse, read


def test_a_preset_takes_values_over_it() -> None:
    found = parse(Cluster, CLUSTERS, "h100-80, nodes=8, across=1e9", what="cluster")
    assert (found.nodes, found.across, found.memory) == (8, 1e9, 85.5e9)


def test_numbers_alone_are_a_model_when_all_that_have_no_default_are_there() -> None:
    found = parse(ModelShape, MODELS, "layers=2,hidden=64,heads=4,vocab=1e3,tied=true,ffn=none", what="model")
    assert (found.layers, found.vocab, found.tied, found.ffn) == (2, 1000, True, None)
    with pytest.raises(ValueError, match=r"^model: hidden, vocab must be given, or a preset \(gpt2, gpt2-xl, "):
        parse(ModelShape, MODELS, "layers=2,heads=4", what="model")


def test_a_table_may_name_a_preset() -> None:
    found = read(ModelShape, MODELS, {"preset": "llama-8b", "sequence": 4096}, what="model")
    assert (found.layers, found.sequence) == (32, 4096)


def test_every_fault_is_said_at_once() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse(Cluster, CLUSTERS, "h300,node=8,nodes=2,nodes=3", what="cluster")
    first, second, third = str(caught.value).splitlines()
    assert first == "cluster: nodes is given twice in 'h300,node=8,nodes=2,nodes=3'"
    assert second.startswith("cluster: 'h300' is not a preset (a100-80, ")
    assert third.startswith("cluster.node: unknown (did you mean nodes? known: nodes, ")


def test_a_value_of_another_type_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"cluster.nodes: must be a whole number >= 1, got 'many'"):
        parse(Cluster, CLUSTERS, "h100-80,nodes=many", what="cluster")
    with pytest.raises(ValueError, match=r"cluster.nodes: must be a whole number >= 1, got 1.5"):
        parse(Cluster, CLUSTERS, "h100-80,nodes=1.5", what="cluster")


def test_a_cluster_of_more_devices_than_can_be_searched_is_refused() -> None:
    assert parse(Cluster, CLUSTERS, "h100-80,nodes=131072", what="cluster").world == 2**20
    with pytest.raises(
        ValueError, match=r"^cluster\.nodes: got 131073, with 1048584 devices together; allowed: at most 1048576$"
    ):
        parse(Cluster, CLUSTERS, "h100-80,nodes=131073", what="cluster")


@pytest.mark.parametrize("given", [{}, [], "", 3, {"preset": "h100-80"}])
def test_a_preset_that_is_no_name_of_one_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"is not a preset \(a100-80, "):
        read(Cluster, CLUSTERS, {"preset": given}, what="cluster")


@pytest.mark.parametrize(
    ("number", "told"),
    [
        ("inside=1e-300", "inside: must be a number >= 1, got 1e-300"),
        ("memory=nan", "memory: must be a number >= 1, got nan"),
        ("latency_inside=1e308", r"latency_inside: must be a number > 0 and <= 3600, got 1e\+308"),
        ("efficiency=2", "efficiency: must be a number > 0 and <= 1, got 2"),
    ],
)
def test_a_number_that_no_machine_has_is_refused_with_what_is_allowed(number: str, told: str) -> None:
    with pytest.raises(ValueError, match=rf"^cluster\.{told}"):
        parse(Cluster, CLUSTERS, f"h100-80,{number}", what="cluster")
