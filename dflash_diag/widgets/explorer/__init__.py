"""Looking at single blocks: what was drafted, what the target says, and what became of it.

Everything shown is read from stored scores and from the capture; nothing is drafted again.
"""

from __future__ import annotations

from dflash_diag.widgets.explorer.exploring import Explorer

__all__ = ["Explorer"]
