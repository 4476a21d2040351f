"""Removes secrets from texts of other programs, such as a server's answer or a signed address.

It recognizes the form of credentials, and secrets in this process's environment.
"""

from __future__ import annotations

import os
import re
from urllib.parse import quote

SHOWN = "***"
_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "GCS_", "GCP_")
_SECRET = re.compile(r"KEY|SECRET|TOKEN|SAS|PASSWORD|CONNECTION_STRING")
_SHORTEST = 6  # a shorter value is no secret, and occurs in many words
_SIGNED = re.compile(
    r"""(?ix)
    (\b (?: sig | signature | x-(?:amz|goog)-(?:signature|credential|security-token) | sharedaccesssignature
          | awsaccesskeyid | accountkey | aws_secret_access_key | authorization ) \b
      (?: ["']?\s*[=:]\s*["']? | > ) (?: (?:bearer|sharedkey|aws4-hmac-sha256)\s+ )? )
    [^\s&;,"'<>]+
    """
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]+")


def redacted(text: str) -> str:
    """`text` with `***` in place of signatures, and of secrets in this process's environment."""
    for secret in _secrets():
        text = text.replace(secret, SHOWN).replace(quote(secret, safe=""), SHOWN)
    return _BEARER.sub(rf"\1{SHOWN}", _SIGNED.sub(rf"\1{SHOWN}", text))


def _secrets() -> list[str]:
    """Secrets, the longest first, because one may be a part of another."""
    found = set[str]()
    for name, value in os.environ.items():
        if name.startswith(_PREFIXES) and _SECRET.search(name):
            found.add(value)
            found.update(part.partition("=")[2] for part in value.split(";"))
    return sorted((value for value in found if len(value) >= _SHORTEST), key=len, reverse=True)
