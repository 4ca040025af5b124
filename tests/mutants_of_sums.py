"""Planted bugs of secure sums: each check of a member is left out once, and each promise, and a named test fails."""

from tests.mutant import Mutant

MEMBER, PROMISES = "client/secure/member.py", "client/secure/promises.py"
AGREED, SECURITY = "client/session/agreed_terms.py", "client/site/security.py"
LIES = ("tests/server/sessions/test_lies.py",)
OF_TERMS = ("tests/client/session/test_agreed_terms.py",)
OF_SITES = ("tests/client/site/test_security.py",)


def _unchecked(name: str, old: str, what: str, *, file: str = MEMBER, new: str | None = None) -> Mutant:
    """Return a mutant that leaves out one check: `old` is its condition, which becomes true."""
    return Mutant(f"sum: {name}", file, old, "True" if new is None else new, what, LIES)


OF_SUMS = (
    # ---------------------------------------------------------------- joining
    _unchecked(
        "promises not asked",
        "        if fault := self._promises.fault(self.terms):\n            return self._leave(fault)\n",
        "a site joins whatever it has promised",
        new="",
    ),
    _unchecked(
        "joined before it is durable",
        "        return [KeepPromise(promise), Send(keys)]",
        "keys leave before the promise is on disk",
        new="        return [Send(keys), KeepPromise(promise)]",
    ),
    _unchecked(
        "keys without the promise",
        "self._signed_keys(made, extended(self._promises.chain, promise))",
        "peers are shown the end of the chain before this session",
        new="self._signed_keys(made, self._promises.chain)",
    ),
    _unchecked(
        "an ended member joins again",
        "        if self.stage is Stage.ENDED:\n            return [Send(self._gone)]\n        if self._keys",
        "a member that has left repeats its keys",
        new="        if self._keys",
    ),
    # ---------------------------------------------------------------- questions
    _unchecked(
        "another question of one kind",
        "if known[0] == question and self.stage is not Stage.ENDED:",
        "a second roster, set or opening is answered as the first one",
        new="if self.stage is not Stage.ENDED:",
    ),
    _unchecked(
        "a question out of turn",
        "        if self.stage is not before:\n            return self._leave",
        "an opening is answered before any survivors",
        new="        if False:\n            return self._leave",
    ),
    _unchecked(
        "answers not kept",
        "        self._answers[type(question)] = question, tuple(effects)\n",
        "a repeated question is answered anew, or ends the session",
        new="",
    ),
    _unchecked(
        "secrets stay after the end",
        "        self.stage, self._secrets, self._gone = Stage.ENDED, None, Gone(reason, refused)\n",
        "a member that has left keeps its secrets",
        new="        self.stage, self._gone = Stage.ENDED, Gone(reason, refused)\n",
    ),
    _unchecked(
        "secrets stay after the reveal",
        "        self._secrets = None\n        self._answers[Boxes]",
        "a member that has revealed keeps the shares that it has not",
        new="        self._answers[Boxes]",
    ),
    _unchecked(
        "pads stay after the reveal",
        "        self._answers[Boxes] = self._answers[Boxes][0], ()",
        "a member that has revealed keeps the keys of its streams",
        new="        pass",
    ),
    # ---------------------------------------------------------------- roster
    _unchecked(
        "names unique",
        "len({*names}) == len(names) and names == sorted(names)",
        "one name has two shares",
        new="names == sorted(names)",
    ),
    _unchecked(
        "names sorted",
        "len({*names}) == len(names) and names == sorted(names)",
        "positions are not those of all",
        new="len({*names}) == len(names)",
    ),
    _unchecked("own keys", "self._keys in members", "a site is in a session with keys that it has not sent"),
    _unchecked("fewest members", "members >= least", "a sum of fewer than min_others + 1 is joined"),
    _unchecked(
        "three members",
        "least = max(MEMBERS_MIN, rules.min_others + 1)",
        "a sum of two is joined, of which each knows the other's input",
        new="least = rules.min_others + 1",
    ),
    _unchecked("most members", "members <= self.terms.members_max", "words overflow"),
    _unchecked("threshold of the rule", "threshold == wanted", "the coordinator chooses how few open a sum"),
    _unchecked(
        "threshold beyond the members",
        "threshold <= members and 2 * threshold",
        "no threshold of members exists",
        new="2 * threshold",
    ),
    _unchecked("colluders", "2 * threshold > members + rules.colluders_max", "two quorums may share colluders alone"),
    _unchecked(
        "colluders off by one",
        "2 * threshold > members + rules.colluders_max",
        "two quorums may share colluders alone",
        new="2 * threshold >= members + rules.colluders_max",
    ),
    _unchecked("keys unique", "len(keys) == len(members)", "two members have one key: one pad is used twice"),
    _unchecked("mask keys unique", '("mask_key", "box_key"):', "two members have one pad", new='("box_key",):'),
    _unchecked("box keys unique", '("mask_key", "box_key"):', "two members have one box key", new='("mask_key",):'),
    _unchecked("terms of all", "member.terms == self._digest", "a member adds the update of another model"),
    _unchecked(
        "signatures of keys",
        "is_signed(member.site.key, member.statement(), member.signature)",
        "the coordinator has put its keys in the place of a member's",
    ),
    _unchecked("trust", "            self._trust(member)\n", "any certified key is trusted", new="            pass\n"),
    _unchecked(
        "forks",
        "            not is_fork,\n",
        "a site that was put back to an older state is in a sum",
        new="            True,\n",
    ),
    _unchecked(
        "forks remembered",
        "            self._peers.accuse(member.site.key, member.chain)\n",
        "a site that was put back is trusted again at its next entry",
        new="            pass\n",
    ),
    _unchecked(
        "peers remembered",
        "            self._peers.remember(member.site.key, member.chain)\n",
        "no site that was put back is ever found",
        new="            pass\n",
    ),
    _unchecked(
        "keys of low order", "masked is not None and boxed is not None", "the coordinator knows the secret of a pair"
    ),
    # ---------------------------------------------------------------- boxes and survivors
    _unchecked("own box", "self._place not in boxes.boxes", "a box that this site has not made is opened"),
    _unchecked(
        "boxes of members",
        'range(len(self._members)), "send shares"',
        "shares of strangers are taken",
        new='range(2**16), "send shares"',
    ),
    _unchecked(
        "sealed boxes",
        '                raise _Refused(f"the box of {self._members[sender].name}: {fault}") from None',
        "a box of another session, pair or direction is taken",
        new="                made.shares[sender] = Shares(0, 0)",
    ),
    _unchecked("sets within those before", "positions <= {*within}", "a survivor has not masked"),
    _unchecked("this site in the sets", "self._place in positions", "a site signs a sum that it is not in"),
    _unchecked(
        "threshold of the sets",
        "least = max(self._threshold, self._rules.min_others + 1)",
        "fewer than the threshold are in a sum",
        new="least = self._rules.min_others + 1",
    ),
    _unchecked(
        "others of the sets",
        "least = max(self._threshold, self._rules.min_others + 1)",
        "fewer than min_others + 1 are in a sum",
        new="least = self._threshold",
    ),
    _unchecked("sizes of the sets", "len(positions) >= least", "a sum of few is opened"),
    _unchecked(
        "survivors among the masked",
        'survivors.positions, self._masking, "survive"',
        "a survivor has not masked",
        new='survivors.positions, range(len(self._members)), "survive"',
    ),
    _unchecked(
        "signed before it is durable",
        "return [KeepPromise(promise), Send(Agreement(self._key.sign(statement)))]",
        "a signature leaves before the promise is on disk",
        new="return [Send(Agreement(self._key.sign(statement))), KeepPromise(promise)]",
    ),
    _unchecked(
        "signed without a promise",
        "return [KeepPromise(promise), Send(Agreement(self._key.sign(statement)))]",
        "no promise is kept of a signature",
        new="return [Send(Agreement(self._key.sign(statement)))]",
    ),
    # ---------------------------------------------------------------- opening
    _unchecked("agreements of survivors", "opening.signatures.keys() <= self._survivors", "the dead agree"),
    _unchecked(
        "agreements to these survivors",
        "is_signed(member.site.key, statement, signature)",
        "agreements to other sets, or of others, open a sum",
    ),
    _unchecked("enough agreements", "len(opening.signatures) >= self._threshold", "fewer than t agree"),
    _unchecked(
        "enough agreements, off by one",
        "len(opening.signatures) >= self._threshold",
        "t - 1 agree",
        new="len(opening.signatures) >= self._threshold - 1",
    ),
    _unchecked(
        "the other share",
        "held[place].seed if place in self._survivors else held[place].key",
        "of each member the wrong share is revealed",
        new="held[place].key if place in self._survivors else held[place].seed",
    ),
    # ---------------------------------------------------------------- promises
    _unchecked(
        "attempts after a signature",
        "        if (terms.run, terms.purpose, terms.round) in self._signed:\n",
        "another attempt is joined after survivors were signed",
        file=PROMISES,
        new="        if False:\n",
    ),
    _unchecked(
        "attempts repeated",
        "(terms.round, terms.attempt) <= newest",
        "an attempt is joined twice",
        file=PROMISES,
        new="(terms.round, terms.attempt) < newest",
    ),
    _unchecked(
        "older attempts",
        "        if (terms.round, terms.attempt) <= newest:\n",
        "an older round is joined",
        file=PROMISES,
        new="        if False:\n",
    ),
    _unchecked(
        "sums from one base",
        "signed >= self.base_repeats_max",
        "updates of one base are in any number of sums",
        file=PROMISES,
        new="False",
    ),
    _unchecked(
        "sums from one base, off by one",
        "signed >= self.base_repeats_max",
        "one sum too many from one base",
        file=PROMISES,
        new="signed > self.base_repeats_max",
    ),
    _unchecked(
        "signatures not counted",
        "            self._bases[base] = self._bases.get(base, 0) + 1\n",
        "sums from one base are not counted",
        file=PROMISES,
        new="            pass\n",
    ),
    _unchecked(
        "signed rounds not kept",
        "            self._signed.add((*of_run, promise.round))\n",
        "a signed round is forgotten",
        file=PROMISES,
        new="",
    ),
    _unchecked(
        "joined attempts not kept",
        "            self._newest[of_run] = max(self._newest.get(of_run, (0, 0)), (promise.round, promise.attempt))\n",
        "joined attempts are forgotten",
        file=PROMISES,
        new="",
    ),
    _unchecked(
        "every promise counts",
        "chain.count + (promise.kind is Kind.JOINED)",
        "peers see counts between which a site can be put back",
        file=PROMISES,
        new="chain.count + 1",
    ),
    _unchecked(
        "a chain without its past",
        'digest("promise", chain.hash, promise.content())',
        "two histories with one last promise are the same",
        file=PROMISES,
        new='digest("promise", promise.content())',
    ),
    _unchecked(
        "other hashes",
        "is_old or ends.get(chain.count, chain.hash) != chain.hash",
        "a fork is not seen",
        file=PROMISES,
        new="is_old",
    ),
    _unchecked(
        "ends before the remembered ones",
        "is_old or ends.get(chain.count, chain.hash) != chain.hash",
        "a fork that is old enough is not seen",
        file=PROMISES,
        new="ends.get(chain.count, chain.hash) != chain.hash",
    ),
    _unchecked(
        "forks forgiven",
        "        if key in self.forked:\n            return True\n",
        "the later ends of a fork are trusted",
        file=PROMISES,
        new="",
    ),
    _unchecked(
        "ends without bound",
        "        for count in sorted(ends)[:-REMEMBERED]:\n            del ends[count]\n",
        "the ends of peers grow without a bound",
        file=PROMISES,
        new="",
    ),
    # ---------------------------------------------------------------- terms, and whom a site trusts
    *(
        Mutant(
            f"sum: terms, {line.split(chr(34))[1]}",
            AGREED,
            f"        {line}\n",
            "",
            "a site adds the update of something else",
            OF_TERMS,
        )
        for line in (
            '("run", invitation.run_id, terms.run),',
            '("round", invitation.round_id, terms.round),',
            '("purpose", "update", terms.purpose),',
            '("base", invitation.base_version, terms.base),',
            '("model", invitation.model_digest, terms.model),',
            '("task", invitation.task, terms.task),',
            '("algorithm", invitation.algorithm, terms.algorithm),',
            '("local", invitation.local, terms.local),',
            '("ranges", ranges_digest(invitation.ranges), terms.ranges),',
        )
    ),
    Mutant(
        "sum: a codec", AGREED, "    if invitation.codec:\n", "    if False:\n", "masked words are encoded", OF_TERMS
    ),
    Mutant(
        "sum: certified keys",
        SECURITY,
        "            check_certified(keys.site, keys.name, self._keeper.current.ca_pem, self._now())\n",
        "",
        "a key is nobody's",
        OF_SITES,
    ),
    Mutant(
        "sum: one site under two names",
        SECURITY,
        "            if (other := owners.setdefault(keys.site.key, keys.name)) != keys.name:\n",
        "            if (other := owners.setdefault(keys.site.key, keys.name)) and False:\n",
        "a sybil counts as another site",
        OF_SITES,
    ),
    Mutant(
        "sum: own key under another name",
        SECURITY,
        "        owners = {own: self._name}\n",
        "        owners: dict[bytes, str] = {}\n",
        "this site counts twice",
        OF_SITES,
    ),
    Mutant(
        "sum: pins",
        SECURITY,
        "            self._check_pinned(keys.name, fingerprint(keys.site.key))\n",
        "            pass\n",
        "every certified site is trusted",
        OF_SITES,
    ),
    Mutant(
        "sum: distrusted sites",
        SECURITY,
        "        if name in peers.distrusted:\n",
        "        if False:\n",
        "a distrusted site is in a sum",
        OF_SITES,
    ),
    Mutant(
        "sum: sites without a pin",
        SECURITY,
        'pinned is None and self._now_policy().trust == "authority"',
        "pinned is None",
        "any certified site is trusted where keys must be pinned",
        OF_SITES,
    ),
    Mutant(
        "sum: other keys than the pinned",
        SECURITY,
        "        if pinned != digits:\n",
        "        if False:\n",
        "another key under a pinned name is trusted",
        OF_SITES,
    ),
    Mutant(
        "sum: damaged files",
        SECURITY,
        "self._promises.fault or self._peers.fault else",
        "False else",
        "a site joins without its promises",
        OF_SITES,
    ),
    Mutant(
        "sum: terms of another run",
        SECURITY,
        "        if terms.run != run:\n",
        "        if False:\n",
        "promises are counted for another run",
        OF_SITES,
    ),
    Mutant(
        "sum: policy of the terms",
        SECURITY,
        "        return terms_fault(self._now_policy(), terms)\n",
        '        return ""\n',
        "a site trains for a sum that its policy does not allow",
        OF_SITES,
    ),
)
