"""What deploy/ ships for Kubernetes and Compose: valid by its schema, hardened, and in words that the commands know."""

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import typer
import yaml
from pydantic import BaseModel
from torch.distributed.run import get_args_parser

from atoll.cli.commands import app
from atoll.client.config import AgentConfig
from atoll.parallel import mesh_client
from atoll.protocol.settings import load_text
from atoll.server.config.process import AggregatorConfig, HostFile
from tests.debian import needs
from tests.deploy import kustomization

DEPLOY = Path(__file__).parents[2] / "deploy"
OPERATIONS = DEPLOY.parent / "docs/operations"
OVERLAYS = sorted(path.name for path in (DEPLOY / "kubernetes/overlays").iterdir())
OLDEST, NEWEST = "1.31", "1.37"
KUBECTL = shutil.which("kubectl")
COMMANDS = typer.main.get_command(app).commands
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SETTINGS = {"aggregator": AggregatorConfig, "agent": AgentConfig, "dashboard": BaseModel}


@cache
def rendered(overlay):
    return kustomization.render(DEPLOY / "kubernetes/overlays" / overlay)


def of_kind(overlay, kind):
    return [each for each in rendered(overlay) if each["kind"] == kind]


def pods():
    for overlay in OVERLAYS:
        for each in of_kind(overlay, "StatefulSet"):
            yield pytest.param(each["spec"]["template"], id=f"{overlay}-{each['metadata']['name']}")


def commands():
    """Yield the arguments of every container of Atoll, with the environment's values in place."""
    for overlay in OVERLAYS:
        for each in of_kind(overlay, "StatefulSet"):
            for container in each["spec"]["template"]["spec"]["containers"]:
                if container["image"].startswith("atoll-") and "command" not in container:
                    arguments = [argument.replace("$(RANK)", "0") for argument in container["args"]]
                    yield pytest.param(arguments, id=f"{overlay}-{each['metadata']['name']}-{container['name']}")
    for name, service in COMPOSE["services"].items():
        arguments = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", argument) for argument in service["command"]]
        yield pytest.param(arguments, id=f"compose-{name}")


@pytest.mark.parametrize("arguments", [*commands()])
def test_the_parser_of_its_command_takes_every_argument(arguments):
    name, *rest = arguments
    context = COMMANDS[name].make_context(name, list(rest))
    overrides = context.params.get("overrides", ())
    assert len(overrides) == " ".join(rest).count("--set")
    if name == "coordinator":
        load_text(HostFile, "", overrides, name="")
    else:
        assert {each.partition("=")[0] for each in overrides} <= set(SETTINGS[name].model_fields)


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_takes_every_resource(overlay, version):
    for each in rendered(overlay):
        kubernetes_validate.validate(each, version, strict=True)


def test_the_schema_refuses_a_mistake():
    [found] = of_kind("standalone", "StatefulSet")
    for spoilt in ({**found["spec"], "replicas": "one"}, {**found["spec"], "replcas": 1}):
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**found, "spec": spoilt}, NEWEST, strict=True)


@pytest.mark.real
@needs("kubectl")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_renders_what_our_reader_renders(overlay):
    command = [KUBECTL, "kustomize", str(DEPLOY / "kubernetes/overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    text = re.sub(r"(name: atoll-(?:site|operations))-[0-9a-z]{10}\b", r"\1", done.stdout)
    key = lambda each: (each["kind"], each["metadata"]["name"])  # noqa: E731
    assert sorted(yaml.safe_load_all(text), key=key) == sorted(rendered(overlay), key=key)


@pytest.mark.parametrize("pod", [*pods()])
def test_a_pod_has_no_right_that_it_does_not_need(pod):
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["terminationGracePeriodSeconds"] >= 30
    rights = spec["securityContext"]
    assert (rights["runAsNonRoot"], rights["runAsUser"], rights["fsGroup"]) == (True, 10001, 10001)
    assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
    mounted = {volume["name"] for volume in spec["volumes"]} | {"state"}
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= mounted


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_policies_and_budgets_meet_the_pods_and_ports_that_they_name(overlay):
    templates = [each["spec"]["template"] for each in of_kind(overlay, "StatefulSet")]

    def matching(labels):
        own = {key: value for key, value in labels.items() if key != "apps.kubernetes.io/pod-index"}
        return [each for each in templates if own.items() <= each["metadata"]["labels"].items()]

    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(overlay, "Service")}
    for name, spec in services.items():
        [template] = matching(spec["selector"])
        ports = {port["name"] for each in template["spec"]["containers"] for port in each.get("ports", ())}
        assert {port.get("targetPort", port["name"]) for port in spec["ports"]} <= ports | {"rendezvous"}, name
        assert not any("appProtocol" in port for port in spec["ports"]), "it invites a proxy to end TLS"
    for kind, key in (("NetworkPolicy", "podSelector"), ("PodDisruptionBudget", "selector")):
        for each in of_kind(overlay, kind):
            assert matching(each["spec"][key]["matchLabels"]), each["metadata"]["name"]
    guarded = [each["spec"]["podSelector"]["matchLabels"] for each in of_kind(overlay, "NetworkPolicy")]
    for each in of_kind(overlay, "StatefulSet"):
        assert any(labels.items() <= each["spec"]["template"]["metadata"]["labels"].items() for labels in guarded)
        assert each["spec"]["serviceName"] in services


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "mesh-site"])
def test_a_coordinator_is_probed_where_it_answers_without_tls(overlay):
    [found] = [each for each in of_kind(overlay, "StatefulSet") if each["metadata"]["name"] == "atoll-coordinator"]
    container = found["spec"]["template"]["spec"]["containers"][0]
    [health] = [argument for argument in container["args"] if argument.startswith("coordinator.health=")]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == int(health.rpartition(":")[2])
    assert container["readinessProbe"]["grpc"]["service"] == "atoll.v1.Coordinator"
    policies = [each for each in of_kind(overlay, "NetworkPolicy") if each["metadata"]["name"] == "atoll-coordinator"]
    assert [port["port"] for port in policies[0]["spec"]["ingress"][0]["ports"]] == [7070, 7071]


def test_a_mesh_starts_by_torchrun_and_finds_its_agent():
    sets = {each["metadata"]["name"]: each for each in of_kind("mesh-site", "StatefulSet")}
    [rank] = sets["atoll-mesh"]["spec"]["template"]["spec"]["containers"]
    assert rank["command"] == ["torchrun"]
    parsed = get_args_parser().parse_args(rank["args"])
    assert parsed.module
    assert (parsed.training_script, parsed.training_script_args) == (mesh_client.__name__, ["/shared/crew"])
    [config] = of_kind("mesh-site", "ConfigMap")
    agent = load_text(AgentConfig, config["data"]["agent.toml"], [], name="agent.toml")
    assert (str(agent.crew.folder), agent.crew.nodes) == ("/shared/crew", int(parsed.nnodes))
    assert agent.crew.nodes == sets["atoll-mesh"]["spec"]["replicas"]
    host, _, port = agent.crew.listen.partition(":")
    [service] = [each["spec"] for each in of_kind("mesh-site", "Service") if each["metadata"]["name"] == host]
    assert [each["port"] for each in service["ports"]] == [int(port)]
    endpoint = parsed.rdzv_endpoint.rpartition(":")[0]
    assert endpoint == f"atoll-mesh-0.{sets['atoll-mesh']['spec']['serviceName']}"


def test_each_rank_has_a_number_an_address_and_a_code():
    [ranks] = [each for each in of_kind("ranks", "StatefulSet") if each["metadata"]["name"] == "atoll-rank"]
    [coordinator] = [
        each for each in of_kind("ranks", "StatefulSet") if each["metadata"]["name"] == "atoll-coordinator"
    ]
    number = ranks["spec"]["replicas"]
    [container] = ranks["spec"]["template"]["spec"]["containers"]
    context = COMMANDS["aggregator"].make_context("a", [each.replace("$(RANK)", "1") for each in container["args"][1:]])
    assert context.params["ranks"] == number
    asked = coordinator["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--aggregators={number}" in asked
    assert "--set=coordinator.start_aggregators=false" in asked
    indices = [each["spec"]["selector"].get("apps.kubernetes.io/pod-index") for each in of_kind("ranks", "Service")]
    assert sorted(filter(None, indices)) == [str(rank) for rank in range(number)]


def test_prometheus_beside_a_coordinator_reads_the_port_that_it_serves():
    [found] = of_kind("monitoring", "StatefulSet")
    coordinator, prometheus = found["spec"]["template"]["spec"]["containers"]
    [address] = [each.partition("=")[2] for each in coordinator["args"] if each.startswith("--metrics=")]
    [config] = of_kind("monitoring", "ConfigMap")
    scraped = yaml.safe_load(config["data"]["prometheus.yml"])["scrape_configs"]
    assert [address] in [each["static_configs"][0]["targets"] for each in scraped]
    assert config["data"]["rules.yml"] == (OPERATIONS / "rules.yml").read_text()
    assert "--config.file=/etc/prometheus/prometheus.yml" in prometheus["args"]


@pytest.mark.real
def test_the_schema_of_compose_takes_the_file():
    tool = Path(sys.executable).with_name("check-jsonschema")
    command = [tool, "--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", list(COMPOSE["services"]))
def test_a_service_of_compose_has_no_right_that_it_does_not_need(name):
    service = COMPOSE["services"][name]
    assert (service["read_only"], service["user"], service["cap_drop"]) == (True, "10001:10001", ["ALL"])
    assert service["tmpfs"] == ["/tmp"]
    named = {volume.partition(":")[0] for volume in service["volumes"]}
    assert {volume for volume in named if not volume.startswith(".")} <= set(COMPOSE["volumes"])


def test_no_file_of_deploy_names_a_registry():
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            text = path.read_text()
            images = re.findall(r"(?:image:|FROM|BASE=)\s*(\S+)", text)
            assert not [each for each in images if "." in each.partition("/")[0] and "/" in each], path
            assert "index-url" not in text
