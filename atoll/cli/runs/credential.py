"""The credential for a coordinator on another machine: this person's, or a named one."""

from dataclasses import replace

from atoll.cli.runs.elsewhere import credential_folder, named_here
from atoll.protocol.identity.enrolling import Place
from atoll.protocol.identity.keeper import Keeper


def credential_and_place() -> tuple[Keeper, Place]:
    """Return the credential, and the addresses of the coordinator to ask.

    Raises:
        CredentialError: there is no credential, or it has expired, or no address is stored beside it.
    """
    folder = credential_folder()
    keeper, place = Keeper(folder), Place.load(folder)
    keeper.check()
    named = named_here()
    if named is not None and named.address and named.address not in (place.address, place.admin_address):
        place = replace(place, admin_address=named.address)
    return keeper, place
