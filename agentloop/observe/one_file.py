"""The page with all that it shows in one HTML file, to be kept or sent: it needs no server.

    index.html, its sheets and scripts, the answers that it would be given ──> one file

Everything stands in the file, and its policy lets nothing else in: scripts and sheets are named by
their hashes, and there is nobody to connect to. What models wrote is data, which cannot end the
element that it stands in.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentloop.plain_json import dumps

__all__ = ["one_file"]

_WEB = Path(__file__).with_name("web")
_STYLE = re.compile(r'<link rel="stylesheet" href="page/([^"]+)">')
_SCRIPT = re.compile(r'<script( defer)? src="page/([^"]+)"></script>\n?')
_CHARSET = '<meta charset="utf-8">\n'


def one_file(bodies: Mapping[str, Any]) -> str:
    """`bodies` are the answers that the page would be given, by their paths (see page.py)."""
    html = _read("index.html")
    sheets = [_read(name) for name in _STYLE.findall(html)]
    scripts = [(_read(name), bool(defer)) for defer, name in _SCRIPT.findall(html)]
    early = [f"<script>{text}</script>\n" for text, is_deferred in scripts if not is_deferred]
    late = [f"<script>{text}</script>\n" for text, is_deferred in scripts if is_deferred]
    policy = "; ".join(
        [
            "default-src 'none'",
            "img-src data:",
            f"script-src {' '.join(_hash(text) for text, _ in scripts)}",
            f"style-src {' '.join(map(_hash, sheets))}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    html = _SCRIPT.sub("", _STYLE.sub("", html))
    before, charset, after = html.partition(_CHARSET)
    head, end_of_head, rest = after.partition("</head>")
    body, end_of_body, tail = rest.rpartition("</body>")
    return "".join(
        [
            *(before, charset),
            # First of all: it holds for what comes after it.
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            head,
            *(f"<style>{sheet}</style>\n" for sheet in sheets),
            *early,
            *(end_of_head, body),
            f'<script id="run" type="application/json">{_data(bodies)}</script>\n',
            *late,
            *(end_of_body, tail),
        ]
    )


def _data(bodies: Mapping[str, Any]) -> str:
    """Return JSON in which no "</script>" or "<!--" is spelled out."""
    return dumps(bodies).decode().replace("<", "\\u003c")


def _read(name: str) -> str:
    text = (_WEB / name).read_text("utf-8")
    # Ours, and never so; but the file would be another one then.
    assert name == "index.html" or not re.search(r"</(script|style)|<!--", text, re.IGNORECASE)
    return text


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
