"""The exact sum of the sites' statistics, and which sums and single sites' parts may be shown. Pure.

The sites that gave a part determine what may be shown of it:

- Its sum is shown over at least as many sites as each of them requires, and at least two, unless all of them allow
  individual parts to be shown.
- A site's part is shown if it allows this. If only few sites allow nothing but sums (one, or fewer than they require),
  the parts of the others and the sum would reveal theirs: then no single part is shown.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.ground.printable import count_of
from atoll.protocol.disclosure import ANY_SUM, Disclosure, MetricsLeave
from atoll.protocol.vocabulary import ClientId
from atoll.training.statistics.parts import Numbers, Part, Place, SiteStatistics, merged

IN_SUMS_ALONE = "its policy allows only sums over several sites"


@dataclass(slots=True)
class Shown:
    """Parts that may be shown, and the reasons for withholding the other parts."""

    sums: dict[Place, tuple[Part, int]] = field(default_factory=dict)
    """Merged parts, each with the number of sites in it."""
    sites: dict[ClientId, dict[Place, Part]] = field(default_factory=dict)
    not_summed: dict[Place, str] = field(default_factory=dict)
    """Parts without a sum, each with the reason."""
    left_out: dict[ClientId, dict[Place, str]] = field(default_factory=dict)
    """Parts that a site has withheld, or that fit to no others."""
    not_alone: dict[ClientId, str] = field(default_factory=dict)
    """Sites whose parts are not, or not all, shown individually."""


def shown(answers: Mapping[ClientId, SiteStatistics], terms: Mapping[ClientId, Disclosure]) -> Shown:
    """Return the parts of answers that may be shown on their terms; a site without terms allows only sums."""
    found = Shown(left_out={client: dict(answers[client].withheld) for client in sorted(answers)})
    for place in dict.fromkeys(place for client in sorted(answers) for place in answers[client].parts):
        parts = {client: answers[client].parts[place] for client in sorted(answers) if place in answers[client].parts}
        usual = _usual_form(parts)
        for client in [client for client, part in parts.items() if part.form != usual]:
            del parts[client]
            found.left_out[client][place] = "of a different kind or shape than at the other sites"
        _show(found, place, parts, {client: terms.get(client, ANY_SUM) for client in parts})
    for client in answers:
        if terms.get(client, ANY_SUM).metrics is not MetricsLeave.PER_SITE:
            found.not_alone[client] = IN_SUMS_ALONE
    found.left_out = {client: places for client, places in found.left_out.items() if places}
    return found


def _show(found: Shown, place: Place, parts: Mapping[ClientId, Part], terms: Mapping[ClientId, Disclosure]) -> None:
    alone = [client for client in parts if terms[client].metrics is MetricsLeave.PER_SITE]
    num_in_sums_alone = len(parts) - len(alone)
    least = max(term.min_sites for term in terms.values())
    needed = max(least, 2) if num_in_sums_alone else least
    if len(parts) >= needed:
        found.sums[place] = merged(parts.values()), len(parts)
    else:
        have = count_of(len(parts), "site gives it", "sites give it")
        found.not_summed[place] = f"{have}, and sums of at least {needed} are allowed"
    if num_in_sums_alone and num_in_sums_alone < max(2, least):
        few = count_of(num_in_sums_alone, "site")
        why = f"{few} allow only sums, and the rest of the total would be theirs"
        found.not_alone |= dict.fromkeys(alone, why)
        return
    for client in alone:
        found.sites.setdefault(client, {})[place] = parts[client]


def _usual_form(parts: Mapping[ClientId, Part]) -> Any:
    """Return the most common form; of equally common ones the smallest."""
    forms = Counter(part.form for part in parts.values())
    return min(forms, key=lambda form: (-forms[form], form))


# ---------------------------------------------------------------- for readers


def document(found: Shown) -> dict[str, Any]:
    """Return the visible parts in JSON types: `merged` and `sites` by split and group, and the reasons for the rest."""
    return {
        "merged": _by_split({place: (part, {"sites": num}) for place, (part, num) in found.sums.items()}),
        "sites": {
            client: _by_split({place: (part, {}) for place, part in parts.items()})
            for client, parts in sorted(found.sites.items())
        },
        "not_merged": {path_of(place): why for place, why in found.not_summed.items()},
        "left_out": {
            client: {path_of(place): why for place, why in places.items()} for client, places in found.left_out.items()
        },
        "not_shown": dict(sorted(found.not_alone.items())),
    }


def path_of(place: Place) -> str:
    """Return the path of a part, such as `train.features.age`."""
    return ".".join(filter(None, place))


def _by_split(parts: Mapping[Place, tuple[Part, dict[str, int]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (split, group, name), (part, more) in parts.items():
        of_split = found.setdefault(split, {})
        if group == "examples":
            assert isinstance(part, Numbers)
            of_split |= {"examples": part.shown()["value"], **more}
        else:
            of_split.setdefault(group, {})[name] = part.shown() | more
    return found
