"""The commands of the program `atoll`."""

from typing import Annotated

import typer

from atoll.cli import chaos, privacy
from atoll.cli.command import if_stopped
from atoll.cli.dashboard import dashboard
from atoll.cli.experiments.compare import compare
from atoll.cli.experiments.population import population
from atoll.cli.experiments.simulate import simulate
from atoll.cli.experiments.sweep import sweep
from atoll.cli.exports.export import export
from atoll.cli.flower import commands as flower
from atoll.cli.group import Commands
from atoll.cli.log import quiet_grpc
from atoll.cli.members import audit, authority, clients, site, site_budgets, site_peers
from atoll.cli.members.join import join
from atoll.cli.new import new
from atoll.cli.plugins import plugins
from atoll.cli.runs import models, ranks, rounds, runs
from atoll.cli.serving import backups
from atoll.cli.serving.agent import agent
from atoll.cli.serving.aggregator import aggregator
from atoll.cli.serving.coordinator import coordinator
from atoll.cli.serving.notify import notify
from atoll.cli.settings import settings
from atoll.cli.training.plan import plan
from atoll.cli.training.train import train

app = typer.Typer(cls=Commands, name="atoll", no_args_is_help=True, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        from atoll.protocol.build import software

        typer.echo(software())
        raise typer.Exit


@app.callback()
def atoll(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version with its build, and exit."),
    ] = False,
) -> None:
    """Federated learning that loses no accepted update: a coordinator, an agent at each site, one task for both."""
    if_stopped("")
    quiet_grpc()  # before any command imports grpc


app.command()(new)
app.command()(coordinator)
app.command()(aggregator)
app.command()(agent)
app.command()(join)
app.command()(simulate)
app.command()(train)
app.command()(compare)
app.command()(sweep)
app.command()(export)
app.add_typer(runs.app, name="run")
app.add_typer(rounds.app, name="round")
app.add_typer(clients.app, name="client")
app.add_typer(authority.app, name="authority")
app.add_typer(models.app, name="model")
app.add_typer(ranks.app, name="rank")
site.app.command()(site_budgets.budgets)
site.app.command()(site_peers.fingerprint)
site.app.command()(site_peers.trust)
site.app.command()(site_peers.distrust)
site.app.command()(site_peers.peers)
site.app.add_typer(site_peers.fingerprints, name="fingerprints")
app.add_typer(site.app, name="site")
app.command()(dashboard)
app.add_typer(audit.app, name="audit")
app.add_typer(flower.app, name="flower")
app.command()(notify)
app.add_typer(backups.app, name="backup")
app.command()(backups.restore)
app.command()(plan)
app.add_typer(privacy.app, name="privacy")
app.add_typer(chaos.app, name="chaos")
app.command()(population)
app.command()(plugins)
app.command()(settings)
