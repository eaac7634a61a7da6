"""Python source as HTML, coloured by the standard library's own tokenizer."""

from __future__ import annotations

import io
import keyword
import tokenize
from collections.abc import Iterable
from html import escape

_KINDS = {tokenize.COMMENT: "comment", tokenize.STRING: "string", tokenize.NUMBER: "number"}


def code_html(source: str, *, anchor: str | None = None) -> str:
    """Returns a `<pre>` with numbered lines, and spans for colours.

    Their classes are pd-keyword, pd-comment, pd-string, pd-number and pd-name, for what is being defined.
    Source that is not valid Python is shown without colours. With an anchor, line 12 is a `pd-row` with the
    id `{anchor}-12`.
    """
    lines = _coloured_lines(source)
    numbered = (f'<span class="pd-line">{number:>4}  </span>{line}' for number, line in enumerate(lines, 1))
    rows: Iterable[str] = numbered
    if anchor is not None:
        name = escape(anchor)
        rows = (f'<span class="pd-row" id="{name}-{n}">{line}</span>' for n, line in enumerate(numbered, 1))
    return '<pre class="pd-code">' + "\n".join(rows) + "</pre>"


def _coloured_lines(source: str) -> list[str]:
    lines = source.splitlines()
    try:
        spans = _spans(source)
    except (tokenize.TokenError, SyntaxError):
        return [escape(line) for line in lines]
    coloured = []
    for number, line in enumerate(lines, 1):
        parts, done = [], 0
        for start, end, name in spans.get(number, []):
            end = len(line) if end is None else end
            parts += [
                escape(line[done:start]),
                f'<span class="pd-{name}">{escape(line[start:end])}</span>',
            ]
            done = end
        coloured.append("".join(parts) + escape(line[done:]))
    return coloured


def _spans(source: str) -> dict[int, list[tuple[int, int | None, str]]]:
    """Returns the coloured pieces of each line: first column, end (None: that of the line), class."""
    spans: dict[int, list[tuple[int, int | None, str]]] = {}
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = _KINDS.get(token.type)
        if token.type == tokenize.NAME and keyword.iskeyword(token.string):
            name = "keyword"
        elif token.type == tokenize.NAME and before in ("def", "class"):
            name = "name"
        before = token.string
        if name is None:
            continue
        (first, start), (last, end) = token.start, token.end
        for line in range(first, last + 1):
            piece = (start if line == first else 0, end if line == last else None, name)
            spans.setdefault(line, []).append(piece)
    return spans
