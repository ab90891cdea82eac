"""Debian's Chromium, driven by Playwright: for the browser tests, and for the README's pictures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
"""The browser, or None where there is none."""
FLAGS = (
    "--no-sandbox",  # which cannot be had as root, as in a container
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window.

    While it runs, this thread has an event loop that runs: no other can be started in it.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def lab_page(browser: Any, url: str, **context: Any) -> Iterator[Any]:
    """JupyterLab in a page of its own, only that notebook open, its kernel ready and then ended."""
    address, _, token = url.partition("?token=")
    kernels = f"{address.partition('/lab/')[0]}/api/kernels"
    headers = {"Authorization": f"token {token}"}
    with browser.new_context(**context) as made:
        made.set_default_timeout(120_000)  # a busy machine takes long to start a kernel
        page = made.new_page()
        # JupyterLab calls a kernel idle that it has not reached yet.
        with page.expect_websocket(lambda one: "/api/kernels/" in one.url) as channel:
            page.goto(f"{url}&reset")
        channel.value.wait_for_event("framereceived")
        page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()
        yield page
        for one in page.request.get(kernels, headers=headers).json():
            page.request.delete(f"{kernels}/{one['id']}", headers=headers)


def run_all(page: Any, *, timeout_s: float = 240) -> None:
    """What the menu *Run, Run All Cells* does, until the last cell has been run."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(DONE, polling=250, timeout=1000 * timeout_s)


DONE = """() => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]
    .every(one => /^\\[\\d+\\]:$/.test(one.textContent.trim()))"""
"""Every code cell has a number: none is waiting, none is running."""
