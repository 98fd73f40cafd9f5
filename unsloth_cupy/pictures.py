"""Colours, titles in any script, and atomic saving for matplotlib pictures."""

import os
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .files import atomic_path

INK, SOFT = "#22272e", "#8b95a1"
FORMATS = ("png", "pdf", "svg")
# Fonts for other scripts, common on many systems; used after the fonts of matplotlib.
FAMILIES = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans",
    "Apple SD Gothic Neo", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS",
    "Noto Sans Devanagari", "Nirmala UI", "Noto Sans Thai", "Leelawadee UI", "Segoe UI Symbol",
)  # fmt: skip


def save_picture(figure: Any, path: Path, call: str = "") -> None:
    """Save a matplotlib figure in the format of the suffix: PNG, PDF or SVG."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if path.suffix[1:].lower() != "png" and epoch:  # the date in a PDF or SVG
        try:
            datetime.fromtimestamp(int(epoch), UTC)
        except (ValueError, OverflowError, OSError):
            problem = f"SOURCE_DATE_EPOCH={epoch} is not a time in seconds; unset it"
            raise ConfigError(f"{call or path}: {problem}") from None
    with atomic_path(path, call) as partial:
        figure.savefig(partial, format=path.suffix[1:].lower())


def write_title(axes: Any, title: str, *, size: float, width: int) -> None:
    """Write a title above axes, in lines of at most ``width`` characters.

    Dollar signs are literal; characters that no font contains are written as escapes.
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
    """Return the installed font families, first the default of matplotlib."""
    from matplotlib.font_manager import fontManager

    known = {font.name for font in fontManager.ttflist}
    return ["DejaVu Sans", *(family for family in FAMILIES if family in known)]


def _glyphs(family: str) -> set[int]:
    """Return the code points of a font."""
    from matplotlib.font_manager import findfont, get_font

    return {*get_font(findfont(family)).get_charmap()}
