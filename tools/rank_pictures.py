"""Rank pictures as SVG, made from the ASCII ones: boxes for pieces, lines for arrows.

    rank 0   [ a a ]              [ a a | b ]         a row of text is a row of the picture,
    rank 1   [ b ]       --->     [ a a | b ]         a column of text a column

Everything stands where it stood as text, so a picture needs no layout of its own. Lines and letters
have the colour of the text around them (currentColor); a piece is tinted by its letter.
"""

from __future__ import annotations

import html
import re

__all__ = ["is_picture", "svg"]

_COLUMN, _ROW, _MARGIN = 9.0, 30.0, 12.0
_BOX = 22.0  # height of a piece
_RANK = re.compile(r"^rank (?:\d+|[A-Z])(?= {2,})", re.MULTILINE)
_PARTS = re.compile(
    r"(?P<rank>^rank (?:\d+|[A-Z])(?= {2,}))|(?P<box>\[[^\[\]]*\])|(?P<right>-{2,}>)|(?P<left><-{2,})"
    r"|(?P<words>[^\s\[](?:\S| (?!\s|\[|-{2,}>|<-{2,}))*|\[)"
)


def is_picture(text: str) -> bool:
    """Tell whether a block of text is a rank picture: rows of ranks, with pieces or arrows."""
    return len(_RANK.findall(text)) >= 2 and bool(re.search(r"\[.*\]|--->|<---", text))


def svg(text: str) -> str:
    """The picture as an SVG element that can stand inside a page."""
    rows = text.rstrip().split("\n")
    width = max(len(row) for row in rows) * _COLUMN + 2 * _MARGIN
    height = sum(map(_height, rows)) + 2 * _MARGIN
    parts, top = [], _MARGIN
    for row in rows:
        parts += _row(row, top + _height(row) / 2)
        top += _height(row)
    return (
        f'<svg class="rank-picture" role="img" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{html.escape(text)}</title>{"".join(parts)}</svg>'
    )


def _height(row: str) -> float:
    return _ROW if row.strip() else _ROW / 2


def _row(row: str, middle: float) -> list[str]:
    parts, at = [], 0
    while found := _PARTS.search(row, at):
        start, at = found.span()
        left, right = _x(start), _x(at)
        if found["box"]:
            parts += _box(found["box"], left, middle)
        elif found["right"] or found["left"]:
            parts.append(_arrow(left, right, middle, to_left=bool(found["left"])))
        else:
            kind = "rank" if found["rank"] else "words"
            parts.append(_text(found[0], left, middle, kind))
    return parts


def _box(box: str, left: float, middle: float) -> list[str]:
    """A piece: a frame, a tint for each cell between bars, and its letters."""
    top, parts, start = middle - _BOX / 2, [], 0
    for cell in box[1:-1].split("|"):
        x, width = left + start * _COLUMN, (len(cell) + 1) * _COLUMN
        letters = set(re.findall(r"[a-z]", cell.lower()))
        if len(letters) == 1:
            parts.append(
                f'<rect class="piece piece-{letters.pop()}" x="{x + _COLUMN / 2:g}" y="{top:g}" '
                f'width="{width:g}" height="{_BOX:g}"/>'
            )
        if start:
            bar = x + _COLUMN / 2
            parts.append(f'<path class="bar" d="M{bar:g} {top:g}v{_BOX:g}"/>')
        if cell.strip():
            column = start + 1 + len(cell) - len(cell.lstrip())
            parts.append(_text(cell.strip(), left + column * _COLUMN, middle, "words"))
        start += len(cell) + 1
    frame = (
        f'<rect class="frame" x="{left + _COLUMN / 2:g}" y="{top:g}" rx="3" '
        f'width="{(len(box) - 1) * _COLUMN:g}" height="{_BOX:g}"/>'
    )
    return [*parts, frame]


def _arrow(left: float, right: float, middle: float, *, to_left: bool) -> str:
    tip, back, end = (left, 7, right) if to_left else (right, -7, left)
    return (
        f'<path class="arrow" d="M{end:g} {middle:g}H{tip:g}m{back} -4.5L{tip:g} {middle:g}'
        f'l{back} 4.5"/>'
    )


def _text(words: str, left: float, middle: float, kind: str) -> str:
    """Text that takes exactly its columns, whatever the font."""
    length = len(words) * _COLUMN
    return (
        f'<text class="{kind}" x="{left:g}" y="{middle + 4.5:g}" textLength="{length:g}" '
        f'lengthAdjust="spacingAndGlyphs" xml:space="preserve">{html.escape(words)}</text>'
    )


def _x(column: int) -> float:
    return _MARGIN + column * _COLUMN
