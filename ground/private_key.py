"""The reader of a private key in PEM, with one error for everything that is none."""

from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes


def private_key_in(pem: bytes) -> PrivateKeyTypes:
    """Return the private key in the content of a file.

    Raises:
        ValueError: it has none, or one with a passphrase, or of an unknown kind. OpenSSL reports a key of another curve
            with this one's length as an internal error.
    """
    try:
        return serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm, InternalError) as error:
        raise ValueError("no private key in PEM without a passphrase") from error
