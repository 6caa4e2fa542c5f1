"""Write the page and its data as one HTML file that needs no server.

    index.html, style sheets, scripts, responses of the API ──> one file

The file's content security policy allows only its own scripts and style sheets, by hash, and no
connections. Text written by models is embedded as JSON that cannot close its element.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from agentloop.plain_json import dumps

_WEB = Path(__file__).with_name("web")
_STYLE = re.compile(r'<link rel="stylesheet" href="page/([^"]+)">')
_SCRIPT = re.compile(r'<script( defer)? src="page/([^"]+)"></script>\n?')
_CHARSET = '<meta charset="utf-8">\n'


def one_file(bodies: Mapping[str, object]) -> str:
    """Return the HTML; `bodies` are the API's responses by path (see page.py)."""
    data = dumps(bodies).decode().replace("<", "\\u003c")  # without "</script>" and "<!--"
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
    head, end_of_head, after_head = after.partition("</head>")
    body, end_of_body, tail = after_head.rpartition("</body>")
    return "".join(
        [
            *(before, charset),
            # First, because the policy applies to everything after it.
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            head,
            *(f"<style>{sheet}</style>\n" for sheet in sheets),
            *early,
            *(end_of_head, body),
            f'<script id="run" type="application/json">{data}</script>\n',
            *late,
            *(end_of_body, tail),
        ]
    )


def _read(name: str) -> str:
    text = (_WEB / name).read_text("utf-8")
    # Our own files never contain these, which would end the element.
    assert name == "index.html" or not re.search(r"</(script|style)|<!--", text, re.IGNORECASE)
    return text


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
