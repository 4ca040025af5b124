"""Keys that no roster could have, as each member would refuse them."""

from dataclasses import replace

import pytest

from atoll.server.rounds.one_sum import OneSum
from tests.server.sessions.small_federation import sites_of, terms_of


@pytest.mark.parametrize("name", ["mask_key", "box_key"])
def test_keys_that_another_member_has_sent_cost_the_later_one_its_place(name):
    first, second, third = (site.member(terms_of()).start()[1].message for site in sites_of(3))
    of = OneSum(0)
    of.keys = {first.name: first, second.name: second}
    assert of.repeated(third) is None
    copied = replace(third, **{name: getattr(second, name)})
    assert of.repeated(copied) == f"its {name.replace('_', ' ')} is that of {second.name}"
    one_site = replace(third, site=replace(third.site, key=first.site.key))
    assert of.repeated(one_site) == f"its site key is that of {first.name}: one site would count twice"
