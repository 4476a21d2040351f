"""Ray's settings in this process's environment, and what answers at a cluster's address.

The settings are its token and its health checks. This needs no Ray. It neither reads nor sends a token
itself.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.cluster.connection import AUTH_MODE, HEALTH_CHECKS, TOKEN, TOKEN_PATH

ANSWER_S = 1.0  # how long a cluster's answer is waited for


def auth(environment: Mapping[str, str], home: Path | None) -> tuple[str, str, bool, int | None, str]:
    """(mode, where a token is, whether that is Ray's own place, its file's rights, why it cannot be read).

    Ray looks at the variable, then the file that is named, then ~/.ray/auth_token.
    """
    mode = environment.get(AUTH_MODE, "")
    if environment.get(TOKEN):
        return mode, f"${TOKEN}", False, None, ""
    named = environment.get(TOKEN_PATH)
    if named:
        path = Path(os.path.expanduser(named))
    elif home is not None:
        path = home / ".ray" / "auth_token"
    else:
        return mode, "", False, None, ""
    try:
        found = path.stat()
        with path.open("rb"):
            pass
    except OSError as error:
        return mode, "", False, None, f"{path}: {error.strerror}" if named else ""
    trouble = "" if found.st_size else f"{path} is empty"
    return mode, str(path), not named, stat.S_IMODE(found.st_mode), trouble


def health_checks(environment: Mapping[str, str]) -> dict[str, str]:
    """Those settings that are set."""
    return {name: environment[name] for name in HEALTH_CHECKS if name in environment}


def ask(address: str) -> tuple[str, float, str, bool]:
    """(why nothing answers, seconds until it did, Ray's version there, whether it wants a token). The version
    is known of a job server, http://HOST:8265, without a token only.
    """
    began = time.monotonic()
    if "://" not in address:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
        except (OSError, ValueError) as error:
            return str(error), 0.0, "", False
        return "", time.monotonic() - began, "", False
    if urlsplit(address).scheme not in ("http", "https"):
        return "neither HOST:PORT nor http://HOST:PORT", 0.0, "", False
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{address.rstrip('/')}/api/version", timeout=ANSWER_S) as answer:
            version = str(json.loads(answer.read()).get("ray_version", ""))
    except urllib.error.HTTPError as error:
        wants = error.code in (401, 403)
        trouble = "" if wants else f"no job server answers there (HTTP {error.code})"
        return trouble, time.monotonic() - began, "", wants
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error)), 0.0, "", False
    return "", time.monotonic() - began, version, False
