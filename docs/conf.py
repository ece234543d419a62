"""Settings of the site. `make docs` builds it, with every warning an error and nothing from the network."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

import tra

project = "tra"
author = "The tra developers"
release = version = tra.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "docstrings",
    "other_files",
]
exclude_patterns = ["_extensions"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # reports of results begin at whatever level they have

# Docstrings are plain text with names in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
add_module_names = False

html_theme = "pydata_sphinx_theme"
html_title = "tra"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # it would be fetched, which a browser refuses where the site is opened as files
html_sidebars = {"index": [], "compared-with": []}
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": "tra"},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "header_links_before_dropdown": 6,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_nav_level": 1,
    "navigation_with_keys": False,
}
copyright = "The tra developers. MIT licence"
pygments_style = "friendly"
