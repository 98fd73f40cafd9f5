"""Sphinx configuration; ``collect.py`` and ``history.py`` write pages, ``outputs.py`` runs them."""

import gc
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from history import repository

from unsloth_cupy import __version__

gc.set_threshold(50_000)  # a build keeps almost all that it makes

project = "unsloth_cupy"
author = "the unsloth_cupy developers"
copyright = f"2026, {author}"
release = version = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_parser",
    "sphinx_copybutton",
    "collect",
    "history",
    "outputs",
]
exclude_patterns = ["_build", "examples", "ops.md"]  # ops.md is part of the page of the API
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # Parameters sections have shapes and dtypes, which type hints lack
numpydoc_show_class_members = False

# The documentation of ``interop.huggingface`` is built without torch and transformers.
DOOR = Path(__file__).parent.parent / "unsloth_cupy" / "interop" / "huggingface"
SHOWN = ("__init__", "_patch", "_callback", "_report")
autodoc_mock_imports = ["torch", "transformers", "unsloth_cupy.interop.torch"]
autodoc_mock_imports += [
    f"unsloth_cupy.interop.huggingface.{path.stem}"
    for path in DOOR.glob("*.py")
    if path.stem not in SHOWN
]
copybutton_selector = ":not(.highlight-text) > div.highlight > pre"
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. |\$ ", True
html_theme = "pydata_sphinx_theme"
html_title = "unsloth_cupy"
html_static_path = ["static"]
html_css_files = ["page.css"]
ALONE = ("index", "install", "performance", "measurements", "history/index", "gallery", "ladders")
ALONE += ("architecture", "contributing", "how-we-know", "tried", "changelog")
html_sidebars = {page: [] for page in ALONE}  # pages without siblings to list
html_theme_options = {
    "header_links_before_dropdown": 6,  # the first pages of the index; the others are under More
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "show_prev_next": False,
}
if (address := repository()) is not None:
    link = {"name": "Repository", "url": address, "icon": "fa-solid fa-code-branch"}
    html_theme_options["icon_links"] = [link]
