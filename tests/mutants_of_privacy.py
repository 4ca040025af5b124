"""Planted bugs of budgets and private sums: each rule of a charge is broken once, and a named test fails."""

from tests.mutant import Mutant

MEMBERSHIP, ROUND = "server/rounds/membership.py", "server/rounds/cohort_round.py"
RUN, RULES, PLAN = "server/rounds/run_machine.py", "server/rounds/privacy_rules.py", "server/folding/plan.py"
OF_CHARGES = ("tests/server/rounds/test_privacy.py",)
OF_PLANS = ("tests/server/folding/test_private.py",)

OF_PRIVACY = (
    Mutant(
        "privacy: charged after the fold",
        ROUND,
        "            return (*releases, self._charge(aggregate, self._privacy), aggregate)\n",
        "            return (*releases, aggregate)\n",
        "a round that closes charges nothing",
        OF_CHARGES,
    ),
    Mutant(
        "privacy: only one client is charged",
        ROUND,
        "        for contribution in aggregate.contributions:\n            self.membership.charge",
        "        for contribution in aggregate.contributions[:1]:\n            self.membership.charge",
        "the other clients of the sum are charged nothing",
        OF_CHARGES,
    ),
    Mutant(
        "privacy: the cap is not enforced",
        RULES,
        "return uses < self.participations_max and spent + self.cost <= self.spent_max",
        "return spent + self.cost <= self.spent_max",
        "a client is in more sums than participations_max",
        OF_CHARGES,
    ),
    Mutant(
        "privacy: the budget is not enforced",
        RULES,
        "return uses < self.participations_max and spent + self.cost <= self.spent_max",
        "return uses < self.participations_max",
        "a client spends more than its epsilon",
        OF_CHARGES,
    ),
    Mutant(
        "privacy: a join refunds",
        MEMBERSHIP,
        "        if member.is_spent:\n            self._spent.add(client_id)\n\n    def settle_for_these",
        "        member.uses, member.spent, member.is_spent = 0, 0.0, False\n\n    def settle_for_these",
        "a client that joins again has its whole budget again",
        OF_CHARGES,
    ),
    Mutant(
        "privacy: the run does not end",
        RUN,
        "        if privacy is None or membership.num_with_budget >= quorum:\n",
        "        if privacy is None or membership.num_with_budget >= 0:\n",
        "a run whose budget is spent opens rounds for ever",
        OF_CHARGES,
    ),
    Mutant(
        "privacy: a restoration is answered twice",
        RUN,
        "        if privacy is None or ledger.restoration == event.restoration:\n",
        "        if privacy is None:\n",
        "each start with --published charges once more",
        OF_CHARGES,
    ),
    Mutant(
        "privacy: deadlines before the charges of a restoration",
        RUN,
        "            effects = self._after(self._published_named(event, now), now)\n        while (deadline",
        "            pass\n        while (deadline",
        "a restored backup is charged for no later round",
        OF_CHARGES,
    ),
    Mutant(
        "privacy: newcomers after a restoration are free",
        MEMBERSHIP,
        "profile, uses=self.unseen_uses, spent=self.unseen_spent, is_spent=self.is_unseen_spent",
        "profile",
        "a client that only the forgotten rounds knew has its whole budget again",
        OF_CHARGES,
    ),
    Mutant(
        "privacy: an open round survives a restoration",
        RUN,
        "        if self.round is not None and self.round.phase is not Phase.AGGREGATING:\n            return eff",
        "        if self.round is None:\n            return eff",
        "clients that have spent their budgets since are in one more sum",
        OF_CHARGES,
    ),
    Mutant(
        "privacy: noise not bound to the set",
        PLAN,
        'contributed = "".join(sorted(contribution.digest for contribution in effect.contributions))',
        'contributed = ""',
        "two sums of one round have equal noise, and their difference has none",
        OF_PLANS,
    ),
    Mutant(
        "privacy: a fold without noise",
        PLAN,
        "        noise=None if private is None else private.planned(effect, base_digest),\n",
        "        noise=None,\n",
        "the exact mean of clipped updates is published under a guarantee",
        OF_PLANS,
    ),
    Mutant(
        "privacy: the wrong denominator",
        PLAN,
        "self.rules.noise_multiplier * self.rules.clip_norm, self.cohort_size, key.hex()",
        "self.rules.noise_multiplier * self.rules.clip_norm, len(effect.contributions), key.hex()",
        "a mean is divided by the number of updates that came",
        OF_PLANS,
    ),
    Mutant(
        "privacy: no clip",
        PLAN,
        "        return clip_factors(norms, clip_to(self.rules.clip_norm, exponent, values))\n",
        "        return [1.0 for _ in norms]\n",
        "one client can move the sum by any length",
        OF_PLANS,
    ),
)
