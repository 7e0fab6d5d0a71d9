"""`octavo cache`: ask a running daemon to save, load or empty its prefix cache, or to show it."""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

from config.errors import ConfigError

ACTIONS = {"save": "/v1/cache/save", "load": "/v1/cache/load", "reset": "/v1/cache/reset", "show": "/debug/cache"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=ACTIONS, help="write the file in --kv-cache-dir, take it back, drop what nobody uses, or list"
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the daemon answers [%(default)s]")
    parser.add_argument(
        "--cafile", type=Path, metavar="FILE", help="certificates to trust instead of the system's, for https"
    )
    parser.add_argument(
        "--admin-api-key",
        metavar="KEY",
        default=os.environ.get("OCTAVO_ADMIN_API_KEY", ""),
        help="the daemon's; OCTAVO_ADMIN_API_KEY when not given",
    )


def run(options: argparse.Namespace) -> int:
    """Print the answer; 1 when the daemon refuses or is not there. Raises ConfigError."""
    path = ACTIONS[options.action]
    method = "GET" if options.action == "show" else "POST"
    headers = {"authorization": f"Bearer {options.admin_api_key}"}
    try:
        trusted = ssl.create_default_context(cafile=options.cafile)
    except OSError:  # ssl.SSLError is one
        raise ConfigError(f"--cafile {options.cafile} is no file of certificates in PEM form") from None
    try:
        request = urllib.request.Request(options.url.rstrip("/") + path, headers=headers, method=method)
        with urllib.request.urlopen(request, context=trusted) as answer:
            told = json.load(answer)
    except urllib.error.HTTPError as error:
        print(f"octavo: {json.load(error)['error']['message']}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        said = f"no daemon answers at {options.url}: {getattr(cause, 'strerror', None) or cause}"
        if isinstance(cause, ssl.SSLCertVerificationError):
            said = f"the daemon's certificate is not trusted ({cause.verify_message}): give its own as --cafile"
        print(f"octavo: {said}", file=sys.stderr)
        return 1
    print(json.dumps(told, indent=None if method == "POST" else 1))
    return 0
