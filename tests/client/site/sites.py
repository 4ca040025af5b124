"""Sites with certificates of one authority, each with a state directory, a policy and its part in secure sums."""

import os
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.client.policy.gate import Gate
from atoll.client.site.peers import PeersFile
from atoll.client.site.security import SiteSecurity
from atoll.protocol.identity.certificates import Issuer, key_to_pem, new_key, to_pem
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import Identity, Role
from tests.client.policy.test_gate import written
from tests.server.sessions.small_federation import SmallFederation, terms_of, vectors_of

NOW = 1_900_000_000.0
CA = Issuer.create("the federation", now=NOW)
PINNED = '[secure]\ntrust = "pinned"\n'


def credential(name: str, role: Role = Role.CLIENT, authority: Issuer = CA, now: float = NOW) -> Credential:
    key = new_key()
    certificate = authority.issue(key.public_key(), Identity(role, name), now=now, lifetime_s=1e6)
    return Credential(key_to_pem(key), to_pem(certificate), to_pem(authority.certificate))


class Site:
    """A site; `start` again is a restart after kill -9."""

    def __init__(self, root: Path, name: str, policy: str = PINNED) -> None:
        self.name, self.folder = name, root / name
        self.folder.mkdir(parents=True)
        self.policy = root / f"{name}.toml"
        self.demand(policy)
        credential(name).store(self.folder / "identity")
        self.start()

    def demand(self, policy: str) -> None:
        self.policy.write_text(f'tasks = ["*"]\nruns = ["*"]\n{policy}')

    def start(self, *, keeper: bool = True) -> None:
        self.stop()
        self.gate = Gate(self.policy, self.folder, lambda: NOW)
        self.keeper = Keeper(self.folder / "identity") if keeper else None
        self.security = SiteSecurity(self.name, self.folder, self.gate, self.keeper, lambda: NOW)

    def stop(self) -> None:
        with suppress(AttributeError):
            self.gate.close()

    def copy(self, to: Path) -> Path:
        """Copy the state directory as a crash at this instant would leave it: what SQLite has synced, open or not."""
        shutil.copytree(self.folder, to, ignore=lambda _, names: [name for name in names if name.endswith("-shm")])
        return to

    def restore(self, backup: Path) -> None:
        """Put a copy of the state directory back."""
        self.stop()
        shutil.rmtree(self.folder)
        shutil.copytree(backup, self.folder)

    def trust(self, *others: "Site") -> None:
        with PeersFile(self.folder).changing() as change:
            change.peers = change.peers.trusting({other.name: other.security.fingerprint for other in others})

    def lines(self, action: str = "") -> list[dict[str, Any]]:
        return [line for line in written(self.folder) if line["action"].startswith(action)]

    # as `small_federation.Site`

    def member(self, terms: Any) -> Any:
        return self.security.member(self.name, terms)

    def keep(self, promise: Any) -> None:
        self.security.keep(promise)


def sites_of(root: Path, count: int = 3, policy: str = PINNED) -> list[Site]:
    """Return sites that have pinned each other."""
    sites = [Site(root, f"site-{number}", policy) for number in range(count)]
    for site in sites:
        site.trust(*(other for other in sites if other is not site))
    return sites


def session(sites: list[Site], **terms: Any) -> SmallFederation:
    """Run one attempt of a session to its end, and return it: `outcome` is the sum or the Fail, `reasons` why not."""
    draw = random.Random(7)
    federation = SmallFederation(sites, vectors_of(sites, draw), terms_of(**terms), draw)
    federation.outcome = federation.run()
    return federation


def mode_of(path: Path) -> int:
    return os.stat(path).st_mode & 0o777
