"""Views with controls for notebooks; each has a static twin for reports.

The live view and its twin are the same HTML: the twin shows one telling choice, so that an exported
page answers without a script.
"""

from __future__ import annotations

from dflash_diag.widgets.blocks import BlockBrowser
from dflash_diag.widgets.explorer import Explorer
from dflash_diag.widgets.states import StateBrowser

__all__ = ["BlockBrowser", "Explorer", "StateBrowser"]
