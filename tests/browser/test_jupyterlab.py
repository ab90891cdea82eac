"""JupyterLab as `lab` starts it: every notebook runs, and what its controls change is seen."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from urllib.error import HTTPError

import browsing
import nbformat
import pytest

from dflash_diag import lab, lab_server, paths, report, storage
from dflash_diag.config import RunConfig
from dflash_diag.runs import Run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.allow_hosts("127.0.0.1"),
    pytest.mark.skipif(browsing.CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """JupyterLab's own files away from this user's, and all cells of a notebook in the page."""
    folder = tmp_path_factory.mktemp("jupyter")
    own = folder / "settings" / "@jupyterlab" / "notebook-extension"
    own.mkdir(parents=True)
    (own / "tracker.jupyterlab-settings").write_text(json.dumps({"windowingMode": "none"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTERLAB_SETTINGS_DIR", str(folder / "settings"))
        patch.setenv("JUPYTERLAB_WORKSPACES_DIR", str(folder / "workspaces"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        patch.setenv("JUPYTER_CONFIG_DIR", str(folder / "config"))
        patch.delenv("JUPYTER_TOKEN", raising=False)
        yield folder


@pytest.fixture(scope="module")
def folders(hostile_config, hostile_site, shared_folder):
    """Where the notebooks of two runs lie: a finished one, and one of drafters that are accepted.

    In the first nothing is ever accepted, so that filters of rounds have nothing to choose from.
    """
    zoo = paths.data_dir() / "zoo" / "hybrid"
    prompts = shared_folder / "accepted.jsonl"
    storage.atomic_write(prompts, ACCEPTED)
    config = RunConfig(
        target=str(zoo / "target"),
        drafter=str(zoo / "drafters" / "healthy"),
        reference=str(zoo / "drafters" / "reference"),
        prompts=str(prompts),
        max_new_tokens=32,
        draws=400,
        out=str(shared_folder / "accepted"),
    )
    return {
        name: lab.write(Run.open(one)).folder
        for name, one in (("", hostile_config), (ROUNDS, config))
    }


ROUNDS = "09_explorer"
"""The notebook that looks at single rounds."""
ACCEPTED = """{"id": "p0", "text": "def mean(values):\\n    "}
{"id": "p1", "text": "for name in names:\\n    print("}
"""


@pytest.fixture(scope="module")
def server(shared_folder, settings, folders):
    """JupyterLab on a folder that holds both."""
    with lab_server.serving(shared_folder, "", port=free_port(), browser=False) as made:
        yield made


@pytest.fixture(scope="module")
def browser(server):
    with browsing.chromium() as made:
        yield made


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize("name", report.NOTEBOOKS)
def test_run_all_works_and_every_control_changes_what_is_shown(
    browser, server, shared_folder, folders, hostile_site, name
):
    copy = folders.get(name, folders[""]) / f"{name}.ipynb"
    url = server.url.replace("?", f"{copy.relative_to(shared_folder)}?")
    with browsing.lab_page(browser, url, viewport={"width": 1400, "height": 1000}) as page:
        elsewhere, dialogs = [], []
        page.on("request", lambda one: elsewhere.append(one.url) if is_elsewhere(one.url) else None)
        page.on("dialog", lambda one: (dialogs.append(one.message), one.dismiss()))
        browsing.run_all(page)
        errors = page.locator('[data-mime-type="application/vnd.jupyter.error"]')
        assert errors.all_inner_texts() == []
        areas = page.locator(".jp-OutputArea-output:has(> .jupyter-widgets)").all()
        assert len(areas) == n_views(hostile_site / "notebooks" / f"{name}.ipynb")
        for area in areas:
            move_all(page, area)
        assert page.get_by_text("Would you like to").count() == 0
        assert elsewhere == dialogs == []


def n_views(notebook) -> int:
    """How many outputs of an executed notebook are static twins of views."""
    cells = nbformat.read(notebook, as_version=4).cells
    pages = [o.get("data", {}).get("text/html", "") for c in cells for o in c.get("outputs", [])]
    return sum('class="browser ' in "".join(one) for one in pages)


def is_elsewhere(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:"))


def move_all(page, area) -> None:
    """Move every control of a view, and see that what it shows is then another."""
    for menu in area.locator("select").all():
        if menu.locator("option").count() > 1:
            choose_another(page, area, menu)
    for slider in area.get_by_role("slider").all():
        first = slider.get_attribute("aria-valuenow") == slider.get_attribute("aria-valuemin")
        key = "ArrowRight" if first else "ArrowLeft"
        assert changes(page, area, lambda s=slider, k=key: s.press(k))
    for box in area.get_by_role("checkbox").all():
        assert changes(page, area, lambda b=box: b.press("Space"))
    # A jump to where one is already shows nothing new: it is tried again after the others.
    jumps = area.locator("button:not([disabled]):not([title$=': next']):not([title$=': previous'])")
    still = jumps.all()
    for _ in range(2):
        still = [o for o in still if not changes(page, area, lambda o=o: o.press("Enter"), 2)]
    assert [one.inner_text() for one in still] == []


def choose_another(page, area, menu) -> None:
    """Choose options until one shows something else, step from there and back, and return."""
    name = menu.evaluate("one => one.labels[0].textContent")
    start, n = menu.evaluate("one => [one.selectedIndex, one.options.length]")
    for at in range(n):
        if at != start and changes(page, area, lambda i=at: menu.select_option(index=i), 2):
            break
    else:
        pytest.fail(f"no option of {name} changes what is shown")
    for way in ("previous", "next") if at else ("next", "previous"):
        for arrow in area.get_by_title(f"{name}: {way}", exact=True).all():
            assert changes(page, area, lambda a=arrow: a.press("Enter")), f"{name}: {way}"
    assert changes(page, area, lambda: menu.select_option(index=start)), name


SHOWN = """area => [...area.querySelectorAll('.widget-html, .widget-image')]
    .map(one => one.outerHTML).join()"""


def changes(page, area, move, within_s: float = 10) -> bool:
    """Whether what is shown changes after a move."""
    before = area.evaluate(SHOWN)
    assert before
    move()
    for _ in range(int(within_s / 0.05)):
        if area.evaluate(SHOWN) != before:
            return True
        page.wait_for_timeout(50)
    return False


def test_the_verb_starts_it_behind_a_token_and_ctrl_c_ends_it(settings, tmp_path):
    port, said = free_port(), []
    command = [sys.executable, "-m", "dflash_diag", "lab", "--no-browser", "--port", str(port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*command, "--out", str(tmp_path)], **pipes) as process:
        try:
            said += [process.stdout.readline() for _ in range(3)]
            url = said[1].partition("JupyterLab: ")[2].strip()
            with urllib.request.urlopen(url) as answer:
                assert b"jupyter-config-data" in answer.read()
            with pytest.raises(HTTPError, match="403"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/contents")
        finally:
            process.send_signal(signal.SIGINT)
            said += process.stdout.readlines()
    assert process.returncode == 0, said
    assert said[3:] == ["JupyterLab has ended; the notebooks stay.\n"]
    with socket.socket() as one:
        assert one.connect_ex(("127.0.0.1", port)) != 0
    written = sorted(path.stem for path in (tmp_path / "lab").glob("*.ipynb"))
    assert written == list(report.NOTEBOOKS)
