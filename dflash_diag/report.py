"""From a run to a site: papermill over the notebooks, then HTML that needs no network.

The notebooks show stored results; nothing is computed here. Pages hold no script and name no other
file, so that one of them can be mailed; the export fails rather than leave a blank space where a
widget or a picture from elsewhere would have been.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup

from dflash_diag import diagnostics, front_page, pages, paths, storage, views
from dflash_diag.ahead import ahead
from dflash_diag.compare_runs import SUMMARY_SCHEMA
from dflash_diag.errors import BadInput, DiagError
from dflash_diag.progress import progress
from dflash_diag.results import MIME_TYPE, Result, Verdict

if TYPE_CHECKING:
    from nbformat import NotebookNode

    from dflash_diag.runs import Run

NOTEBOOKS = {
    "00_overview": "Overview",
    "01_checkpoint": "Checkpoint",
    "02_acceptance": "Acceptance",
    "03_hidden_state_divergence": "States",
    "04_position_alignment": "Convention",
    "05_attention_mask": "Mask",
    "06_train_vs_eval": "Train vs. eval",
    "07_training_audit": "Step",
    "08_compare": "Compare",
    "09_explorer": "Explorer",
}
"""Notebooks of the report in order, and what their pages are called."""
START_S, CELL_S = 300, 3600
"""Seconds that a kernel may take to start, and a cell to end: it shows what is there."""
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STUB = re.compile(r"^(interactive|[HV]Box|Output|\w+(Slider|Progress|Dropdown))\(")


def build(run: Run) -> Path:
    """Compute what is missing, run the notebooks and write the site.

    Returns
    -------
    Path
        ``OUT/index.html``.

    Raises
    ------
    DiagError
        A notebook fails, or a page would need the network, or is too large.
    """
    with ahead(run, report=True):
        results = run.compute()
    storage.write_json(run.out / "run.json", run.config.model_dump(mode="json"))
    pages_of = {f"{path.stem}.html": page_html(path, run) for path in _executed(run)}
    made = {"index.html": index_html(run, results), **pages_of}
    for name, html in made.items():
        views.check_offline(html, name)
        views.check_size(html, name)
    made["summary.json"] = storage.to_json_text(summary(run, results))
    made["junit.xml"] = junit(results)
    storage.write_together(run.out, made)  # where index.html is, all is
    return run.out / "index.html"


# --- notebooks ------------------------------------------------------------------------------------


def _executed(run: Run) -> list[Path]:
    """All notebooks, one a core: a kernel spends its time on imports and on drawing."""
    made = []
    with (
        progress(len(NOTEBOOKS), "notebooks", unit="page") as stage,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        for path in pool.map(lambda name: _execute_in_thread(name, run), NOTEBOOKS):
            made.append(path)
            stage.update()
    return made


def _execute_in_thread(name: str, run: Run) -> Path:
    """`execute` outside the main thread, whose event loop nobody else would close."""
    from jupyter_core.utils import ensure_event_loop

    with closing(ensure_event_loop()):
        return execute(name, run)


def execute(name: str, run: Run) -> Path:
    """Run one notebook with the run's parameters; the executed copy is kept.

    Raises
    ------
    BadInput
        The notebook does not take a parameter that would be passed: papermill only logs that.
    DiagError
        A cell fails or does not end, or the kernel dies.
    OutputError
        The copy cannot be written.
    """
    import papermill
    from nbclient.exceptions import CellTimeoutError
    from papermill.exceptions import PapermillExecutionError

    source, made = paths.notebooks_dir() / f"{name}.ipynb", run.out / "notebooks" / f"{name}.ipynb"
    known = papermill.inspect_notebook(str(source))
    parameters = notebook_parameters(run, known)
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise BadInput(f"{source.name} has no parameter {', '.join(unknown)}", ", ".join(known))
    storage.make_dir(made.parent)
    part = made.with_name(f".{made.name}")
    # The kernel's folder, so that it imports this very package, installed or not. papermill's own
    # ``cwd`` would move this process, while other notebooks start.
    place = {"metadata": {"path": str(Path(__file__).resolve().parents[1])}}
    try:
        with (
            storage.output_errors(made),
            tempfile.TemporaryDirectory(prefix="dflash-") as sockets,
        ):
            papermill.execute_notebook(
                str(source),
                str(part),
                parameters=parameters,
                kernel_name="python3",
                progress_bar=False,
                start_timeout=START_S,
                execution_timeout=CELL_S,
                resources=place,
                **_quiet_kernel(sockets),
            )
            part.replace(made)
    except PapermillExecutionError as error:
        part.replace(made)  # whole, with the cell that failed
        raise DiagError(
            f"{name}, cell {error.exec_count}: {error.ename}: {error.evalue}; see {made}"
        ) from error
    except CellTimeoutError as error:
        raise DiagError(f"{name}: a cell has not ended after {CELL_S} s") from error
    except RuntimeError as error:
        raise DiagError(f"{name}: its kernel died or does not answer ({error})") from error
    finally:
        part.unlink(missing_ok=True)
    return made


def _quiet_kernel(sockets: str) -> dict[str, Any]:
    """Keep a kernel's log off the terminal, and its messages off TCP ports where files do.

    ``sockets`` is a folder of this kernel's own: the files' names are the same for all.
    """
    quiet: dict[str, Any] = {"extra_arguments": ["--IPKernelApp.log_level=50"]}
    if os.name == "posix":
        from traitlets.config import Config

        quiet["config"] = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/ipc"}})
    return quiet


def notebook_parameters(run: Run, known: Container[str]) -> dict[str, Any]:
    """What a notebook is given: the fields that it takes by name, the others under ``options``."""
    given, resolved = (one.model_dump(mode="json") for one in (run.given, run.config))
    defaults = type(run.given)().model_dump(mode="json")
    # What was not given is resolved there as it was here.
    values = {k: resolved[k] for k, value in given.items() if value != defaults[k]}
    values["out"] = str(run.out)
    named = {k: v for k, v in values.items() if k in known}
    return {**named, "options": {k: v for k, v in values.items() if k not in known}}


def page_html(notebook: Path, run: Run) -> str:
    """One executed notebook as a page of the site.

    Raises
    ------
    DiagError
        It holds a widget without a static twin.
    """
    import nbformat
    from nbconvert import HTMLExporter

    node = nbformat.read(notebook, as_version=4)
    refuse_stubs(node, notebook.name)
    node.metadata.pop("widgets", None)  # with it, a page would ask for the widgets' scripts
    for cell in node.cells:
        if cell.cell_type == "code":
            cell.outputs = [_anchored(output) for output in cell.outputs if _is_shown(output)]
    exporter = HTMLExporter(
        template_name="basic",
        exclude_input=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    body, _ = exporter.from_notebook_node(node)
    return _render(
        "page.html.j2",
        run,
        current=f"{notebook.stem}.html",
        title=f"{NOTEBOOKS[notebook.stem]} · {_subject(run)}",
        body=Markup(views.polish(body)),  # noqa: S704 - escaped where it was made
        notebook=notebook.name,
    )


def _is_shown(output: Any) -> bool:
    """Progress lines and warnings stay in the executed notebook."""
    return not (output.output_type == "stream" and output.name == "stderr")


def _anchored(output: Any) -> Any:
    """A result's HTML under an id that other pages link to."""
    data = output.get("data", {})
    if MIME_TYPE in data and "text/html" in data:
        data["text/html"] = f'<div id="{data[MIME_TYPE]["id"]}">{data["text/html"]}</div>'
    return output


def refuse_stubs(node: NotebookNode, name: str) -> None:
    """Fail where a page would show nothing but a widget's name."""
    for cell in node.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = "".join(data.get("text/plain", ""))
            if "text/html" in data:
                continue
            if WIDGET_VIEW in data or WIDGET_STUB.match(text):
                raise DiagError(f"{name} shows a widget without a static twin: {text[:60]}")


# --- pages ----------------------------------------------------------------------------------------


def index_html(run: Run, results: Sequence[Result]) -> str:
    """The front page."""
    return _render(
        "index.html.j2",
        run,
        current="index.html",
        title=_subject(run),
        **front_page.content(run, results, NOTEBOOKS),
    )


def _subject(run: Run) -> str:
    n = run.metrics("drafter")["n_prompts"]
    return f"{run.name('drafter')} on {run.target_name}, {n} prompts"


def _render(template: str, run: Run, **values: Any) -> str:
    """A page of the site."""
    links = [{"file": "index.html", "label": "Summary"}]
    links += [{"file": f"{stem}.html", "label": label} for stem, label in NOTEBOOKS.items()]
    provenance = run.provenance()
    return pages.render(
        template,
        pages=links,
        subject=_subject(run),
        provenance=provenance["content"],
        finished=provenance["times"]["finished"],
        **values,
    )


# --- for programs -----------------------------------------------------------------------------


def summary(run: Run, results: Sequence[Result]) -> dict[str, Any]:
    """Content of ``summary.json``."""
    known = diagnostics.catalogue()
    return {
        "schema": SUMMARY_SCHEMA,
        "verdict": run.verdict().name,
        "headline": front_page.headline({one.id: one for one in results}),
        "drafters": {role: run.name(role) for role in run.roles},
        "steps": {role: run.step_of(role) for role in run.roles},
        "capture": os.path.relpath(run.capture.path, run.out),
        "target": run.target_name,
        "scores": {role: run.metrics(role) for role in run.roles},
        "results": [
            {
                "id": one.id,
                "question": one.question,
                "verdict": one.verdict.name,
                "headline": one.headline,
                "reason": one.params.get("judged"),
                "estimates": {key: e.to_json() for key, e in one.estimates.items()},
                "page": f"{known[one.id].page}.html#{one.id}",
            }
            for one in results
        ],
        "config": run.config.model_dump(mode="json"),
        "provenance": run.provenance(),
    }


def junit(results: Sequence[Result]) -> str:
    """Content of ``junit.xml``: a test case a question; WARN and INCONCLUSIVE pass with a note."""
    counts = {verdict: sum(r.verdict is verdict for r in results) for verdict in Verdict}
    suite = ElementTree.Element(
        "testsuite",
        name="dflash_diag",
        tests=str(len(results)),
        failures=str(counts[Verdict.FAIL]),
        errors=str(counts[Verdict.ERROR]),
        skipped=str(counts[Verdict.SKIPPED]),
    )
    for one in results:
        case = ElementTree.SubElement(suite, "testcase", classname="dflash_diag", name=one.id)
        reason = _xml_text(str(one.params.get("judged") or one.headline))
        kind = JUNIT.get(one.verdict)
        if kind:
            ElementTree.SubElement(case, kind, message=reason)
        note = ElementTree.SubElement(case, "system-out")
        note.text = _xml_text(f"{one.verdict.name}: {one.headline}")
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


JUNIT = {Verdict.FAIL: "failure", Verdict.ERROR: "error", Verdict.SKIPPED: "skipped"}


def _xml_text(text: str) -> str:
    """Without the control characters that XML 1.0 cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)
