"""Claim tokens: 256 bits nobody can guess, kept hashed, and yet told again to whoever lost the answer."""

from __future__ import annotations

import hashlib
import hmac

from django.conf import settings


def token(nonce: str) -> str:
    """Make the token of a stored nonce; without SECRET_KEY the nonce tells nothing."""
    return hmac.new(settings.SECRET_KEY.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
