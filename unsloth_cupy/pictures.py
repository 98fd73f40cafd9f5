"""Colours, titles in any script and atomic saving for pictures of matplotlib."""

import os
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .files import atomic_path

INK, SOFT = "#22272e", "#8b95a1"
FORMATS = ("png", "pdf", "svg")
# Fonts for other scripts that many systems have; used after matplotlib's own if installed.
FAMILIES = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans",
    "Apple SD Gothic Neo", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS",
    "Noto Sans Devanagari", "Nirmala UI", "Noto Sans Thai", "Leelawadee UI", "Segoe UI Symbol",
)  # fmt: skip


def save_picture(figure: Any, path: Path, call: str = "") -> None:
    """Write a figure of matplotlib into a file, in the format of its suffix: PNG, PDF or SVG."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if path.suffix[1:].lower() != "png" and epoch:  # as the date of a PDF or an SVG
        try:
            datetime.fromtimestamp(int(epoch), UTC)
        except (ValueError, OverflowError, OSError):
            problem = f"SOURCE_DATE_EPOCH={epoch} is not a time in seconds; unset it"
            raise ConfigError(f"{call or path}: {problem}") from None
    with atomic_path(path, call) as partial:
        figure.savefig(partial, format=path.suffix[1:].lower())


def write_title(axes: Any, title: str, *, size: float, width: int) -> None:
    """Write a title of any characters above axes, in lines of at most ``width`` characters.

    A dollar sign does not begin a formula; a character that no font has is written as its escape.
    """
    families = _families()
    glyphs = [_glyphs(family) for family in families]
    shown = "".join(
        c if c.isspace() or any(ord(c) in known for known in glyphs) else _escaped(c) for c in title
    )
    lines = textwrap.fill(shown, width if shown.isascii() else width // 2, break_on_hyphens=False)
    axes.set_title(
        lines, loc="left", fontsize=size, color=INK, pad=10, parse_math=False, fontfamily=families
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _families() -> list[str]:
    """Return the names of the installed fonts, matplotlib's own first."""
    from matplotlib.font_manager import fontManager

    known = {font.name for font in fontManager.ttflist}
    return ["DejaVu Sans", *(family for family in FAMILIES if family in known)]


def _glyphs(family: str) -> set[int]:
    """Return the code points that a font can draw."""
    from matplotlib.font_manager import findfont, get_font

    return {*get_font(findfont(family)).get_charmap()}
