"""Foreign strings (names, messages, paths) made harmless for a terminal, for Markdown and for XML."""

from __future__ import annotations

import html
import re


def clean(text: object) -> str:
    """Printable characters and line ends only: no terminal codes, and nothing that XML or UTF-8 cannot hold."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "\ufffd" for sign in str(text))


def markdown(text: object) -> str:
    """One line of plain text in Markdown: neither markup, nor a cell's end, nor HTML."""
    line = " ".join(clean(text).split())
    # Of brackets only those that could end a link's text, of underscores those not inside a word: names stay readable.
    return re.sub(r"([\\`*|#~]|\](?=[(\[:])|(?<!\w)_|_(?!\w))", r"\\\1", html.escape(line, quote=False))
