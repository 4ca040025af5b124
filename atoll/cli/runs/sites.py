"""The metrics and the meshes of single sites, as tables."""

from collections.abc import Iterator, Mapping
from typing import Any

from atoll.cli.printing import as_json, say, table
from atoll.ground.printable import count_of, printable_size, some_of

LINES_MAX = 40
"""The largest number of sites in a table; the worst ones come first."""


def show_sites(found: Mapping[str, Any], *, json: bool) -> None:
    """Print the metrics of a run's sites, of its newest evaluation and of its newest trainings, and their meshes."""
    if json:
        as_json(found)
        return
    meshes = found.get("meshes") or {}  # an older coordinator elsewhere shows none
    if not meshes and not any(found[kind]["sites"] or found[kind]["not_shown"] for kind in ("evaluation", "training")):
        say(
            f"run {found['run']} has no metrics of single sites: they come with an update, and with an evaluation "
            '(evaluation.clients_every), from sites whose policy has metrics = "per_site"'
        )
    for kind in ("evaluation", "training"):
        if found[kind]["version"] is not None:
            say_sites(f"{kind}, version {found[kind]['version']}", found[kind])
    if meshes:
        say_meshes(meshes)


def say_meshes(meshes: Mapping[str, Any]) -> None:
    """Print the use of the sites' meshes, each in its newest training, and why the utilization of some is not known."""
    say("\nmeshes, newest training:")
    rows = [
        [
            *(site, use["round"], use["num_ranks"]),
            printable_size(use["peak_bytes"]) if use["peak_bytes"] else "-",
            _text(use["steps_per_s"]),
            _text(use["flops_per_s"] and use["flops_per_s"] / 1e9),
            "-" if use["mfu"] is None else f"{use['mfu']:.1%}",
        ]
        for site, use in sorted(meshes.items())
    ]
    table(["site", "round", "ranks", "most memory of a rank", "steps/s", "GFLOP/s", "MFU"], rows, empty="")
    for why, names in _by_reason({site: use["why_no_mfu"] for site, use in meshes.items() if use["why_no_mfu"]}):
        say(f"no MFU: {names}: {why}")


def say_sites(title: str, part: Mapping[str, Any]) -> None:
    """Print a table of sites and metrics, the spread of each metric, and the reason for each site without.

    Args:
        title: the heading.
        part: `sites`, `metrics` and `not_shown` of a document of `server.views.sites`.
    """
    metrics = list(part["metrics"])
    if part["sites"]:
        say(f"\n{title}:")
        first = metrics[0] if metrics else ""
        descends = bool(first) and part["metrics"][first]["worst"]["value"] > part["metrics"][first]["best"]["value"]
        order = sorted(part["sites"], key=lambda site: _key(part["sites"][site].get(first), descends))
        rows = [[site, *(_text(part["sites"][site].get(metric)) for metric in metrics)] for site in order[:LINES_MAX]]
        table(["site", *metrics], rows, empty="")
        if len(order) > LINES_MAX:
            say(f"... and {count_of(len(order) - LINES_MAX, 'site')} more; --json has all")
    for metric, spread in part["metrics"].items():
        worst = spread["worst"]
        say(
            f"{metric}: mean {spread['mean']:.4g}, standard deviation {spread['deviation']:.3g} over "
            f"{count_of(spread['num_sites'], 'site')}; worst {worst['site']} ({worst['value']:.4g})"
        )
    for why, names in _by_reason(part["not_shown"]):
        say(f"not shown: {names}: {why}")


def _by_reason(whys: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each reason, and the names of up to ten of its sites."""
    reasons: dict[str, list[str]] = {}
    for site, why in whys.items():
        reasons.setdefault(why, []).append(site)
    for why, names in reasons.items():
        yield why, some_of(names, 10)


def _key(value: float | None, descends: bool) -> tuple[bool, float]:
    return value is None, (-value if descends else value) if value is not None else 0.0


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
