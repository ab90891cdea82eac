"""The command lines of a watch: what it starts, anybody could type."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from dflash_diag.config import RunConfig
from dflash_diag.executors import Command

OPTIONS = {"overrides": "set", "claims": "claim"}
"""Options that are not called like their field."""
ONE_TEXT = {"prompts", "max_new_tokens", "server", "server_model", "server_timeout", "layers"}
"""What decides the capture, and nothing once it is there."""
CAPTURED = ONE_TEXT | {
    "target",
    "drafter",
    "reference",
    "beside",
    "device",
    "dtype",
    "backend",
    "chat_template_kwargs",
}
"""What the verb capture takes."""
NO_OPTION = {"like", "draws"}
"""Fields that neither of the two verbs takes."""


def capture(config: RunConfig, out: Path, log: Path) -> Command:
    """Make the capture that all checkpoints with the same taps are scored on."""
    return _verb("capture", config, set(RunConfig.model_fields) - CAPTURED, out, log)


def report(config: RunConfig, out: Path, log: Path) -> Command:
    """Make the report of one checkpoint; ``config`` names it and the capture."""
    return _verb("report", config, ONE_TEXT | NO_OPTION, out, log, "--no-open")


def report_in_parts(config: RunConfig, out: Path, log: Path, n: int) -> list[list[Command]]:
    """The same with its prompts scored by ``n`` processes: what may run together, in turns."""
    if n < 2:
        return [[report(config, out, log)]]
    captured = {name: RunConfig.model_fields[name].default for name in ONE_TEXT}
    given = config.model_copy(update=captured | {"out": str(out)})

    def shard(what: str) -> Command:
        content = given.model_dump_json()
        return Command.python("dflash_diag.shards", what, str(n), given=content, log=log)

    parts = [shard(str(part)) for part in range(n)]
    return [parts, [shard("merge")], [report(config, out, log)]]


def _verb(
    verb: str, config: RunConfig, without: Collection[str], out: Path, log: Path, *more: str
) -> Command:
    arguments: list[str] = []
    for name, known in RunConfig.model_fields.items():
        value = getattr(config, name)
        if name == "out" or name in without or value == known.default:
            continue
        option = f"--{OPTIONS.get(name, name).replace('_', '-')}"
        for one in value if isinstance(value, tuple) else [value]:
            arguments += [option, json.dumps(one) if isinstance(one, dict) else str(one)]
    return Command.python("dflash_diag", verb, *arguments, "--out", str(out), *more, log=log)
