"""A folder to watch without models: checkpoints are small JSON files, reports take no time.

``python watched.py identity`` and ``python watched.py report OUT DRAFTER`` stand in for the
processes that a watch starts. A checkpoint holds ``{"rounds": [...], "do": ...}``: the tokens of
the rounds of each prompt, and what its report does: fail, fail once, hang, find the disk full.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path


def install() -> None:
    """Let `dflash_diag.watch` start these processes in place of its own."""
    from dflash_diag.executors import Command
    from dflash_diag.watch import commands, identity

    def identify(config, log):
        return run(log, "identity", given=config.model_dump_json())

    def report(config, out, log, n=1):
        return [[run(log, "report", str(out), config.drafter)]]

    def run(log, *arguments, given=""):
        return Command((sys.executable, "-S", __file__, *arguments), str(log), given)

    identity.command = identify
    commands.report_in_parts = report


def write(path: Path, rounds: list[list[int]], **more: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rounds": rounds, **more}))
    return path


def identify(config: dict) -> None:
    if not config["drafter"]:
        return
    content = Path(config["drafter"]).read_bytes()
    try:
        step = json.loads(content).get("step")
    except ValueError:
        sys.exit("error: it is truncated or corrupted")
    key = hashlib.sha256(content).hexdigest()
    sys.stdout.write(json.dumps({"key": key, "capture": "", "step": step}))


def report(out: Path, drafter: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from dflash_diag.deadlines import end_with_starter

    end_with_starter()
    content = json.loads(drafter.read_text())
    out.mkdir(parents=True, exist_ok=True)
    tried = out / "tried"
    before = tried.read_text() if tried.exists() else ""
    tried.write_text(before + "x")
    match content.get("do"):
        case "fail":
            sys.exit("Traceback and all that\nerror: 02_acceptance, cell 3: out of memory")
        case "fail once" if not before:
            sys.exit("error: the GPU fell off the bus")
        case "hang once" if not before:
            time.sleep(600)
        case "full" if drafter.with_name("full").exists():
            sys.exit(f"error: cannot write {out}: the disk is full; free some space")
        case "short":
            time.sleep(0.3)
        case "slow":
            time.sleep(1.5)
    rounds = content["rounds"]
    tokens, n = sum(map(sum, rounds)), sum(map(len, rounds))
    tau = {"value": tokens / n, "lo": tokens / n - 0.1, "hi": tokens / n + 0.1}
    per_prompt = [{"id": f"p{i}", "rounds": one} for i, one in enumerate(rounds)]
    scored = {"tau": {"walked_micro": tau, "uniform_micro": tau}, "per_prompt": per_prompt}
    reference = {"per_prompt": [{"id": f"p{i}", "rounds": [4]} for i in range(len(rounds))]}
    finished = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    summary = {
        "verdict": "PASS",
        "drafters": {"drafter": drafter.stem, "reference": "theirs"},
        "scores": {"drafter": scored, "reference": reference},
        "config": {"drafter": str(drafter)},
        "provenance": {"content": {"text": "c0ffee"}, "times": {"finished": finished}},
    }
    (out / "summary.json").write_text(json.dumps(summary))
    (out / "index.html").write_text("<p>report</p>")


if __name__ == "__main__":
    if sys.argv[1] == "identity":
        identify(json.loads(sys.stdin.read()))
    else:
        report(*map(Path, sys.argv[2:]))
