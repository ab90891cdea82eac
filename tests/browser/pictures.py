"""The README's pictures, taken from a finished run of the embedded example.

::

    python -m dflash_diag report --out out/example
    python tests/browser/pictures.py out/example

They go to ``data/pictures``, with a palette of 128 colours so that they stay small.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import browsing
from PIL import Image

from dflash_diag import lab, lab_server, report
from dflash_diag.config import RunConfig
from dflash_diag.runs import Run

FOLDER = Path(__file__).parents[2] / "data" / "pictures"
WIDE, PHONE = {"width": 1200, "height": 900}, {"width": 400, "height": 1150}
COLOURS = 128
TOP = 12
"""Pixels above what a picture is about."""
BROWSER = "09_explorer" if "09_explorer" in report.NOTEBOOKS else "04_position_alignment"
"""The notebook whose controls are shown."""


def keep(name: str, page: Any) -> None:
    """What the page shows, as a small PNG."""
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    path = FOLDER / f"{name}.png"
    shot.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    sys.stdout.write(f"{path}: {path.stat().st_size / 1024:.0f} KiB\n")


def report_pictures(browser: Any, out: Path) -> None:
    """The front page on a screen and on a phone at night, and where the tokens went."""
    for name, settings in (
        ("report", {"viewport": {**WIDE, "height": 1150}}),
        ("phone", {"viewport": PHONE, "color_scheme": "dark"}),
    ):
        with browser.new_context(**settings) as context:
            page = context.new_page()
            page.goto((out / "index.html").resolve().as_uri())
            keep(name, page)
    with browser.new_context(viewport={"width": 860, "height": 640}) as context:
        page = context.new_page()
        page.goto((out / "06_train_vs_eval.html").resolve().as_uri())
        scroll_to(page, page.locator('[id="gap.decomposition"]'))
        keep("gap", page)


def scroll_to(page: Any, what: Any) -> None:
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    what.evaluate(f"one => scrollTo(0, one.getBoundingClientRect().top + scrollY - {TOP})")


def lab_picture(browser: Any, folder: Path) -> None:
    """A notebook in JupyterLab after *Run All*, its controls in sight."""
    with (
        lab_server.serving(folder, f"{BROWSER}.ipynb", browser=False) as server,
        browsing.lab_page(browser, server.url, viewport=WIDE) as page,
    ):
        browsing.run_all(page)
        page.locator(".jp-OutputArea-output .jupyter-widgets").first.evaluate(
            "one => one.closest('.jp-Cell').scrollIntoView({block: 'start'})"
        )
        page.wait_for_timeout(1000)
        keep("lab", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the finished run")
    out = parser.parse_args().out
    copies = lab.write(Run.open(RunConfig(out=str(out))))
    with browsing.chromium() as browser:
        report_pictures(browser, out)
        lab_picture(browser, copies.folder)


if __name__ == "__main__":
    main()
