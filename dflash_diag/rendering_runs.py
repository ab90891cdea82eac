"""What other renderings of a run's chat prompts cost, kept in the run's folder.

::

    OUT/captures/KEY          the target's answers to the prompts as each rendering has them
    OUT/renderings/KEY.json   the template, and a row a rendering
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dflash_diag import storage
from dflash_diag.diagnostics.base import DRAFTER, Skip
from dflash_diag.errors import PromptError
from dflash_diag.renderings import Rendering, chat_prompts, price, template_facts

if TYPE_CHECKING:
    from dflash_diag.bundle import Capture
    from dflash_diag.prompts import Prompt
    from dflash_diag.runs import Run

VERSION = "renderings/1"


def renderings_of(run: Run) -> Mapping[str, Any]:
    """The template and the price of every rendering that was asked for.

    Returns
    -------
    Mapping
        ``template`` (dialect, sha256), ``target``, ``rows``: rendering, name, n_prompts, p, and
        tau, tau_usual and delta as estimates; ``refused``: why, by name, the template takes the
        others not.

    Raises
    ------
    Skip
        No rendering was asked for, or there are no chat prompts, or no target, to try it with.
    """
    wanted = [Rendering(spec) for spec in run.config.render]
    if not wanted:
        raise Skip("No other rendering was asked for (--render off, --render system=TEXT).")
    if run.config.capture or run.config.server:
        raise Skip(
            "The text is given, so the target writes none (--render needs --target and --prompts)."
        )
    if DRAFTER not in run.roles:
        raise Skip("No drafter was given, so nothing was drafted (--drafter).")
    chats = chat_prompts(run.prompts)
    if not chats:
        raise Skip("No prompt is made of chat messages, so there is no template to leave off.")
    content = (VERSION, run.score_key(DRAFTER), list(run.config.render), run.seed, run.draws)
    path = run.out / "renderings" / f"{storage.content_key(*content)[:12]}.json"
    found: Mapping[str, Any] = storage.kept_json(path, lambda: _measured(run, wanted, chats))
    if not found["rows"]:
        raise Skip(f"No other rendering is possible: {next(iter(found['refused'].values()))}.")
    return found


def _measured(run: Run, wanted: list[Rendering], chats: list[Prompt]) -> dict[str, Any]:
    rows, refused = [], {}
    for one in wanted:
        try:
            rows.append(_row(run, one, chats))
        except PromptError as error:  # some templates know no system prompt
            refused[one.name] = str(error)
    template = template_facts(getattr(run.target.tokenizer, "chat_template", None))
    return {"template": template, "target": run.target_name, "rows": rows, "refused": refused}


def _row(run: Run, rendering: Rendering, chats: list[Prompt]) -> dict[str, Any]:
    scores = run.scores_on(_capture(run, [rendering.apply(one) for one in chats]), DRAFTER)
    found = price(run.scores(DRAFTER), scores, seed=run.seed, draws=run.draws)
    return {
        "rendering": rendering.spec,
        "name": rendering.name,
        "n_prompts": found.delta.n,
        "tau": found.tau.to_json(),
        "tau_usual": found.tau_usual.to_json(),
        "delta": found.delta.to_json(),
        "p": found.p,
    }


def _capture(run: Run, prompts: list[Prompt]) -> Capture:
    """The target's answers to prompts as they are rendered; made once."""
    from dflash_diag.bundle import Capture
    from dflash_diag.capture import make_capture

    key = storage.content_key(VERSION, run.capture_key, [one.to_json() for one in prompts])
    folder = run.out / "captures" / key[:12]
    if not (folder / "manifest.json").is_file():
        make_capture(
            run.target,
            prompts,
            folder,
            max_new_tokens=run.config.max_new_tokens,
            layers="taps",
            taps=run.taps or None,
            chat_template_kwargs=run.config.chat_template_kwargs,
        )
    return Capture.load(folder, verify=False)
