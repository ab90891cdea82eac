"""Drafters and finished runs as members of one comparison, kept in the run's folder.

::

    OUT/compare/KEY.json    pairs, slots, prompts, trend

A drafter is scored on the run's own capture. A finished run is read from its ``summary.json``,
which has the rounds of every prompt: its drafter, target and capture may be gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_diag import storage
from dflash_diag.compare import Side
from dflash_diag.comparison import Member, compared
from dflash_diag.diagnostics.base import DRAFTER, REFERENCE
from dflash_diag.errors import BadInput
from dflash_diag.trend import Point, line_of, trend

if TYPE_CHECKING:
    from dflash_diag.config import RunConfig
    from dflash_diag.runs import Run
    from dflash_diag.training_logs import TrainingLog

VERSION = "compare/2"
SUMMARY_SCHEMA = "dflash_diag.summary/1"
PACKAGES = (
    "dflash-diag",
    "torch",
    "transformers",
    "flash-linear-attention",
    "causal-conv1d",
)
"""Packages whose versions can move a number."""


NOTHING = "Nothing was given to compare the drafter with (--reference, --beside)."


def is_run(path: str | Path) -> bool:
    """Whether a path is the folder of a run, finished or not, and no checkpoint."""
    folder = Path(path)
    if (folder / "config.json").is_file():
        return False
    return (folder / "run.json").is_file() or (folder / "scores").is_dir()


def check_beside(config: RunConfig) -> None:
    """Refuse, before anything is computed, runs and a history that cannot be read.

    Raises
    ------
    BadInput
        One of them.
    """
    from dflash_diag.history import read_history

    for path in config.beside:
        if is_run(path):
            member_of_folder(path)
    if config.history:
        if not Path(config.history).is_file():
            raise BadInput(f"no such file: {config.history}", "a history.parquet (verb watch)")
        read_history(config.history)


# --- members --------------------------------------------------------------------------------------


def members_of(run: Run) -> list[Member]:
    """The judged drafter, what it is compared with, and the reference last.

    Raises
    ------
    BadInput
        A run's folder cannot be read, or a drafter cannot be scored on this capture.
    """
    others = iter(run.others)
    beside = [
        member_of_folder(path) if is_run(path) else _member(run, next(others))
        for path in run.config.beside
    ]
    own = {role: _member(run, role) for role in run.roles}
    found = [own[DRAFTER], *beside, *(own[role] for role in run.roles if role != DRAFTER)]
    return named(found)


def _member(run: Run, role: str) -> Member:
    from dflash_diag import metrics

    jumps = {row["id"]: row["rounds"] for row in metrics.per_prompt(run.scores(role))}
    side = Side.of(jumps, name=run.name(role), capture=run.text_digest, step=run.step_of(role))
    facts = _facts(run.provenance()["content"], run.config.model_dump(mode="json"), role)
    return Member(
        side,
        jumps,
        run.convention(role).n_proposed,
        facts,
        line_of(run.path(role)),
        role == REFERENCE,
        storage.content_key(run.checkpoint(role).files),
    )


def member_of_folder(folder: str | Path, role: str = DRAFTER) -> Member:
    """A drafter of a finished run.

    Raises
    ------
    BadInput
        There is no finished report in the folder, one of another version, or none of a drafter.
    """
    folder = Path(folder)
    path = folder / "summary.json"
    if not path.is_file():
        raise BadInput(
            f"{folder} holds no finished report (no summary.json)",
            "a folder that the verb report has written",
            f"finish it: dflash-diag report ... --out {folder}",
        )
    summary = storage.read_json(path)
    schema = summary.get("schema") if isinstance(summary, dict) else None
    if schema != SUMMARY_SCHEMA:
        raise BadInput(f"{path} has schema {schema}", SUMMARY_SCHEMA, "run the report again")
    scores = summary.get("scores")
    if not isinstance(scores, dict) or role not in scores:
        raise BadInput(f"{path} has no scores of a {role}", "a report of one")
    return _read(summary, folder, role)


def _read(summary: Mapping[str, Any], folder: Path, role: str) -> Member:
    try:
        scored, config = summary["scores"][role], summary["config"]
        jumps = {row["id"]: row["rounds"] for row in scored["per_prompt"]}
        content = summary["provenance"]["content"]
        name, step = summary["drafters"][role], summary["steps"][role]
        side = Side.of(jumps, name=name, capture=content["text"], step=step)
        facts = _facts(content, config, role)
        return Member(
            side,
            jumps,
            scored["n_proposed"],
            facts,
            line_of(config[role]),
            role == REFERENCE,
            storage.content_key(content["drafters"][name]["files"]),
            str(folder),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInput(
            f"{folder / 'summary.json'} does not tell what was decoded ({error})",
            "a report of this version",
            f"write it again: dflash-diag report ... --out {folder}",
        ) from error


def _facts(content: Mapping[str, Any], config: Mapping[str, Any], role: str) -> dict[str, str]:
    """What two measurements should have in common, in words; what is unknown is left out."""
    target = content["target"]
    backend = target.get("backend") or {}
    files = (target.get("files") or {}).get("weights") or {}
    found = {f"version of {name}": content["versions"].get(name) for name in PACKAGES}
    found |= {
        "target's weights": storage.content_key(files)[:12] if files else None,
        "target's dtype": target.get("dtype"),
        "target's device": target.get("device"),
        "target's backend": "/".join(
            str(backend[key]) for key in ("linear", "form", "convolution") if backend.get(key)
        ),
        "target's attention": target.get("attention"),
        "drafter's device": config["device"],
        "drafter's dtype": config["dtype"],
        "read": ", ".join(config["overrides"] if role == DRAFTER else ()) or "as declared",
        "prompts and continuations": content["text"][:12],
    }
    return {key: str(value) for key, value in found.items() if value not in (None, "")}


def named(members: Sequence[Member]) -> list[Member]:
    """The same under names that are all different.

    Two of one name get their run's folder, or the folder that the checkpoints lie in; what is the
    same even so is numbered.
    """
    names = [one.side.name for one in members]
    for more in (_in_folder, _in_line):
        longer = [more(one, name) for one, name in zip(members, names, strict=True)]
        alike = {
            name: {b for a, b in zip(names, longer, strict=True) if a == name} for name in names
        }
        names = [b if len(alike[a]) > 1 else a for a, b in zip(names, longer, strict=True)]
    seen: dict[str, int] = {}
    made = []
    for one, name in zip(members, names, strict=True):
        seen[name] = seen.get(name, 0) + 1
        number = f" ({seen[name]})" if seen[name] > 1 else ""
        made.append(replace(one, side=replace(one.side, name=f"{name}{number}")))
    return made


def _in_folder(member: Member, name: str) -> str:
    return f"{name} in {Path(member.folder).name}" if member.folder else name


def _in_line(member: Member, name: str) -> str:
    parent = Path(member.line).name
    return name if member.folder or not parent else f"{parent}/{name}"


# --- comparisons ----------------------------------------------------------------------------------


def compared_of(run: Run, members: Sequence[Member] | None = None) -> Mapping[str, Any]:
    """What a run's drafters are compared to be, computed if it is not there.

    Parameters
    ----------
    members
        In another order than `members_of` has them.

    Raises
    ------
    BadInput
        There is nothing to compare with, or it was scored on other text.
    """
    members = members_of(run) if members is None else members
    log, history = _log(run.config), run.config.history
    key = storage.content_key(
        VERSION,
        [one.digest() for one in members],
        None if log is None else log.frame.to_dict("list"),
        storage.sha256_file(history) if history else "",
        run.seed,
        run.draws,
    )
    path = run.out / "compare" / f"{key[:12]}.json"
    if not path.is_file():
        found = compared_members(members, log=log, history=history, seed=run.seed, draws=run.draws)
        storage.write_json(path, found)
    kept: Mapping[str, Any] = storage.read_json(path)
    return kept


def compare(config: RunConfig) -> Mapping[str, Any]:
    """What the verb compare does: drafters and runs in the order given, the reference last.

    The first checkpoint is the drafter of a run whose capture all of them are scored on; where no
    text is named, that is the capture of the first finished run. Without a checkpoint no run is
    needed. Where nothing is named at all, the embedded example's drafter meets its reference.

    Raises
    ------
    BadInput
        Fewer than two, something that cannot be read, or measurements of different text.
    """
    asked = [one for one in (config.drafter, *config.beside, config.reference) if one]
    if len(asked) == 1:
        raise BadInput(f"only {asked[0]} to compare", "two drafters or finished runs, or more")
    lacking = next((one for one in asked if not Path(one).expanduser().exists()), None)
    if lacking:
        raise BadInput(f"no such file or folder: {lacking}", "a drafter, or a finished run")
    check_beside(config.model_copy(update={"beside": tuple(asked)}))
    if asked and all(map(is_run, asked)):
        return _compare_finished(asked, config)
    return _compare_scored(asked, config)


def _compare_finished(asked: Sequence[str], config: RunConfig) -> Mapping[str, Any]:
    members = named(_marked([member_of_folder(one) for one in asked], config))
    return compared_members(
        members,
        log=_log(config),
        history=config.history,
        seed=config.seed,
        draws=config.draws,
        beside=[] if config.reference else _references(asked, members),
    )


def _compare_scored(asked: Sequence[str], config: RunConfig) -> Mapping[str, Any]:
    from dflash_diag.runs import Run

    first = next((at for at, one in enumerate(asked) if not is_run(one)), 0)
    update: dict[str, Any] = {
        "drafter": "".join(asked[first : first + 1]),
        "beside": (*asked[:first], *asked[first + 1 :]),
        "reference": "",
    }
    finished = [one for one in asked if is_run(one)]
    if finished and not (config.capture or config.target):
        update["capture"] = _capture_of(finished[0])
    run = Run.open(config.model_copy(update=update))
    with run.alone():
        members = members_of(run)
        members.insert(first, members.pop(0))
        return compared_of(run, _marked(members, config))


def _marked(members: Sequence[Member], config: RunConfig) -> list[Member]:
    """The same, the last one being the reference where one was named."""
    if not config.reference:
        return list(members)
    return [*members[:-1], replace(members[-1], is_reference=True)]


def _references(runs: Sequence[str], members: Sequence[Member]) -> list[Member]:
    """The reference of the first run that has one on the same text, if it is not a member."""
    text = members[0].side.capture
    for folder in runs:
        if REFERENCE not in storage.read_json(Path(folder) / "summary.json")["scores"]:
            continue
        found = member_of_folder(folder, REFERENCE)
        if found.side.capture == text:
            known = any(one.weights == found.weights for one in members)
            return [] if known else named([*members, found])[-1:]
    return []


def _capture_of(folder: str) -> str:
    """The capture that a finished run used."""
    kept = storage.read_json(Path(folder) / "summary.json").get("capture")
    path = Path(folder) / str(kept)
    if not kept or not path.exists():
        raise BadInput(
            f"the capture of {folder} is not there any more",
            "text to score a checkpoint on",
            "give --capture, or --target and --prompts",
        )
    return str(path.resolve())


def _log(config: RunConfig) -> TrainingLog | None:
    from dflash_diag.training_logs import read_training_log

    return read_training_log(config.training_log) if config.training_log else None


def beside_key(run: Run) -> list[Any]:
    """What a run's comparison depends on beside its drafter, reference and capture."""
    others = iter(run.others)
    beside = [
        storage.sha256_file(Path(path) / "summary.json")
        if is_run(path)
        else [run.name(role := next(others)), run.score_key(role)]
        for path in run.config.beside
    ]
    history = run.config.history
    return [VERSION, beside, storage.sha256_file(history) if history else ""]


def compared_members(
    members: Sequence[Member],
    *,
    seed: int,
    draws: int,
    log: TrainingLog | None = None,
    history: str = "",
    beside: Sequence[Member] = (),
) -> dict[str, Any]:
    """A comparison with its trend, as plain JSON."""
    found = compared(members, seed=seed, draws=draws, beside=beside)
    own, *others = (
        Point(one.side, one.side.tau(seed=seed, draws=draws), one.line)
        for one in members
        if one is members[0] or not one.is_reference
    )
    line = trend([*_past(history), *others], own, log=log, seed=seed, draws=draws)
    made: dict[str, Any] = storage.plain(
        found
        | {
            "trend": None if isinstance(line, str) else line,
            "no_trend": line if isinstance(line, str) else None,
        }
    )
    return made


def _past(history: str) -> list[Point]:
    """Every checkpoint of a history."""
    from dflash_diag.history import read_history

    if not history:
        return []
    return [Point(row.side, row.tau, line_of(row.checkpoint)) for row in read_history(history)]
