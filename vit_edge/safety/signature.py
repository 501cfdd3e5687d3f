"""Ed25519 signatures of bundle.json, which holds the digest of everything else. The only module that imports cryptography.

The signature's file is the 64 bytes themselves, as `openssl pkeyutl -sign -rawin` writes them; keys are PEM files.
"""

from pathlib import Path
from typing import Any

from vit_edge.errors import UserError

SIGNATURE_BYTES = 64
MAX_KEY_BYTES = 1 << 16
MAKE_KEYS = (
    "make a pair: openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out pub.pem"
)


def sign(content: bytes, key: Path) -> bytes:
    """The signature of `content` with the private key in a PEM file."""
    (serialization, ed25519), pem = _library(), _pem(key)
    try:
        private = serialization.load_pem_private_key(pem, password=None)
    except TypeError as err:
        raise UserError(
            f"{key} is encrypted with a password", "decrypt it: openssl pkey -in key.pem -out plain.pem"
        ) from err
    except Exception as err:  # ValueError, or a type of the library's own
        raise UserError(f"{key} holds no private key in PEM form", MAKE_KEYS) from err
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise UserError(f"{key} holds another kind of key than Ed25519", MAKE_KEYS)
    return bytes(private.sign(content))


def verify(content: bytes, signature: bytes, key: Path, shown: Path) -> None:
    """UserError unless `signature` is that of `content` by the owner of the public key in a PEM file.

    shown: what is signed, for the message.
    """
    (serialization, ed25519), pem = _library(), _pem(key)
    try:
        public = serialization.load_pem_public_key(pem)
    except Exception as err:  # ValueError, or a type of the library's own
        raise UserError(f"{key} holds no public key in PEM form", MAKE_KEYS) from err
    if not isinstance(public, ed25519.Ed25519PublicKey):
        raise UserError(f"{key} holds another kind of key than Ed25519", MAKE_KEYS)
    try:
        public.verify(signature, content)
    except Exception as err:  # InvalidSignature, which is no ValueError
        raise UserError(
            f"{shown} is not signed by the owner of {key}: it was changed, or another key signed it",
            "get the bundle again from its maker, or the public key that belongs to it",
        ) from err


def _pem(key: Path) -> bytes:
    if not key.is_file():
        raise UserError(f"{key} is not there, or no file", MAKE_KEYS)
    with key.open("rb") as file:
        return file.read(MAX_KEY_BYTES)


def _library() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as err:
        raise UserError("signatures need the package cryptography", 'pip install "vit-edge[sign]"') from err
    return serialization, ed25519
