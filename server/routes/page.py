"""The daemon's own page at `/`: files that this serves as they are. All they show comes from the other routes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

FOLDER = Path(__file__).parents[1] / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {"/page/" + file.name: file for file in sorted(FOLDER.iterdir()) if file.suffix in TYPES}
FILES["/"] = FILES.pop("/page/index.html")  # it names the others without a leading slash: any path prefix will do
PATHS = frozenset(FILES)  # open without a key
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def router() -> APIRouter:
    routes = APIRouter()
    for path, file in FILES.items():
        routes.add_route(path, partial(_answer, file.read_bytes(), TYPES[file.suffix]), methods=["GET"])
    return routes


async def _answer(content: bytes, media_type: str, _: Request) -> Response:
    return Response(content, headers=HEADERS, media_type=media_type)
