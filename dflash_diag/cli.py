"""``python -m dflash_diag VERB``: capture, score, doctor, divergence, report.

Every verb turns its options into one `RunConfig` and hands it on. Exit codes: 0 done; 1
``--fail-on`` met; 2 bad input, with one line on standard error; 3 interrupted, resumable.

Nothing heavy is imported before a verb runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dflash_diag.errors import BadInput, DiagError
from dflash_diag.servers import TIMEOUT_S

if TYPE_CHECKING:
    from dflash_diag.config import RunConfig
    from dflash_diag.results import Result

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 3

EPILOG = """
Start here: [bold]dflash-diag report[/bold] builds the report of the embedded example.

Exit codes: 0 done; 1 --fail-on met; 2 bad input (one line says what to do); 3 interrupted: the
same command resumes.
"""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="How many tokens does a DFlash drafter really get accepted?",
    epilog=EPILOG,
)

INPUTS, MACHINE, OUTPUT = "What to measure", "How to run it", "What comes out"


def _option(help_: str, *names: str, metavar: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_, metavar=metavar, rich_help_panel=panel, **more)


Target = Annotated[
    str, _option("Target: a transformers folder, or a hub id.", metavar="DIR_OR_ID", panel=INPUTS)
]
Drafter = Annotated[
    str,
    _option(
        "Drafter: a folder with config.json and model.safetensors, or a .pt file.",
        metavar="PATH",
        panel=INPUTS,
    ),
]
Reference = Annotated[
    str, _option("Another drafter to compare with.", metavar="PATH", panel=INPUTS)
]
Prompts = Annotated[
    str,
    _option(
        'Lines {"id", "text"}, {"id", "messages"} or {"id", "prompt_ids"}.',
        metavar="FILE.jsonl",
        panel=INPUTS,
    ),
]
NewTokens = Annotated[
    int,
    _option(
        "G: tokens that the target generates for each prompt.",
        "--max-new-tokens",
        metavar="G",
        panel=INPUTS,
        show_default="128",
    ),
]
CaptureDir = Annotated[
    str,
    _option("Use this capture; the target is then not needed.", metavar="DIR", panel=INPUTS),
]
Against = Annotated[
    str,
    _option(
        "Compare states with this: a capture of the same tokens, or BACKEND/DTYPE, such as "
        "torch/bfloat16; several are separated by commas.",
        metavar="DIR|BACKEND/DTYPE",
        panel=INPUTS,
    ),
]
OnePrompt = Annotated[
    str,
    _option(
        "Prompt on which modules are compared; the first unless given.", metavar="ID", panel=INPUTS
    ),
]
Overrides = Annotated[
    list[str],
    _option(
        "Read the drafter differently, e.g. --set context_bound=inclusive. Repeatable.",
        "--set",
        metavar="FIELD=VALUE",
        panel=INPUTS,
    ),
]
LosslessPrompts = Annotated[
    int,
    _option(
        "Decode this many prompts, spread over all of them, for the lossless check; 0: all.",
        metavar="N",
        panel=MACHINE,
    ),
]
ServedOutput = Annotated[
    str,
    _option(
        'A server\'s greedy output to check: lines {"id", "output_ids" or "text"}.',
        metavar="FILE.jsonl",
        panel=INPUTS,
    ),
]
Claims = Annotated[
    list[str],
    _option(
        "A number that a dashboard or a colleague gave, e.g. --claim dds8=3.58. Repeatable.",
        "--claim",
        metavar="NAME=VALUE",
        panel=INPUTS,
    ),
]
TrainingLog = Annotated[
    str,
    _option(
        "Log of the training: CSV, JSONL, a TensorBoard folder or a Weights & Biases export.",
        metavar="FILE",
        panel=INPUTS,
    ),
]
TrainingSequences = Annotated[
    str,
    _option(
        "Texts of the training, to measure it again: a folder or a .safetensors with tokens and "
        "prefix or loss_mask, or JSONL.",
        metavar="PATH",
        panel=INPUTS,
    ),
]
Step = Annotated[
    str,
    _option("One training step to audit, as a function.", metavar="FILE.py:FUNC", panel=INPUTS),
]
ServerUrl = Annotated[
    str,
    _option(
        "Take the continuations from this server (SGLang, vLLM, transformers serve).",
        "--server",
        metavar="URL",
        panel=INPUTS,
    ),
]
ServerModel = Annotated[
    str,
    _option("The model's name there, if it has several.", metavar="NAME", panel=INPUTS),
]
ServerTimeout = Annotated[
    float,
    _option(
        "Seconds for a server to be ready, and for one prompt.",
        metavar="S",
        panel=MACHINE,
    ),
]
TemplateKwargs = Annotated[
    str,
    _option("For the tokenizer's chat template.", metavar="JSON", panel=INPUTS),
]
Layers = Annotated[
    str,
    _option(
        "States to keep: the tapped layers, also their neighbours, or all.",
        metavar="taps|around|all",
        panel=MACHINE,
    ),
]
Device = Annotated[
    str,
    _option(
        "Where to compute; split spreads a large target over all GPUs, then memory, then disk.",
        metavar="auto|cpu|cuda|split",
        panel=MACHINE,
    ),
]
Dtype = Annotated[
    str,
    _option(
        "auto: float32 on a CPU, the checkpoint's on a GPU.",
        metavar="auto|float32|bfloat16|float16",
        panel=MACHINE,
    ),
]
Backend = Annotated[
    str,
    _option(
        "Code for the target's linear-attention layers: auto, fla or torch; add +chunked or "
        "+recurrent, +causal-conv1d or +torch-conv to say more.",
        metavar="auto|fla|torch",
        panel=MACHINE,
    ),
]
Seed = Annotated[int, _option("Of the resampling.", metavar="S", panel=MACHINE)]
FailOn = Annotated[
    str,
    _option(
        "Exit with 1 when a verdict is this bad.",
        "--fail-on",
        metavar="none|warn|fail",
        panel=OUTPUT,
    ),
]
Json = Annotated[
    str,
    _option("Write the numbers here too; - is standard output.", metavar="FILE", panel=OUTPUT),
]
Out = Annotated[str, _option("Folder for everything that is kept.", metavar="DIR", panel=OUTPUT)]


@app.callback()
def _verbs() -> None:
    """Say how many tokens a DFlash drafter really gets accepted."""


@app.command(
    epilog="""
Examples:

  dflash-diag capture --target Qwen/Qwen3.5-4B --prompts mine.jsonl --out captures/mine

  dflash-diag capture --target ./target --prompts mine.jsonl --server http://localhost:30000

  dflash-diag score --capture captures/mine --drafter checkpoints/step_8000

  dflash-diag capture --target ./target --like captures/mine --backend torch --out captures/torch
"""
)
def capture(
    target: Target,
    prompts: Prompts = "",
    drafter: Drafter = "",
    max_new_tokens: NewTokens = 0,
    like: Annotated[
        str,
        _option(
            "Take the tokens of this capture in place of prompts and decoding, to compare with it.",
            metavar="CAPTURE",
            panel=INPUTS,
        ),
    ] = "",
    server: ServerUrl = "",
    server_model: ServerModel = "",
    server_timeout: ServerTimeout = TIMEOUT_S,
    layers: Layers = "around",
    device: Device = "auto",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    chat_template_kwargs: TemplateKwargs = "",
    out: Out = "",
) -> int:
    """Run a target over prompts once and keep what scoring needs.

    The capture holds the greedy continuations and the hidden states, so it can be made on a GPU
    machine and scored on a laptop. Prints the folder and, on standard error, whether the text that
    a server wrote is the target's own.

    With --drafter the states kept are those that this drafter taps (and their neighbours); without
    it, those that the usual layer rule picks. --layers all keeps every layer.

    With --like nothing is decoded: this target, backend and precision run over the tokens of a
    capture that is there, so that the two can be compared state by state.
    """
    from dflash_diag import runs, views

    config = _config(locals())
    made = runs.capture_only(config)
    typer.echo(str(made.path))
    text = runs.judge_text(config, made)
    if text is not None:
        # Not on standard output, where a script finds the folder.
        typer.echo(f"server  {views.verdict_line(text)}", err=True)
    return DONE


@app.command(
    epilog="""
Examples:

  dflash-diag score --target ./target --drafter ./step_8000 --prompts mine.jsonl

  dflash-diag score --capture captures/mine --drafter ./step_8000 --json step_8000.json

  dflash-diag score --capture captures/mine --drafter ./step_8000 --set context_bound=inclusive
"""
)
def score(
    drafter: Drafter,
    target: Target = "",
    prompts: Prompts = "",
    reference: Reference = "",
    max_new_tokens: NewTokens = 0,
    capture: CaptureDir = "",
    overrides: Overrides = [],  # noqa: B006 - typer's way to repeat an option
    served_output: ServedOutput = "",
    server: ServerUrl = "",
    server_model: ServerModel = "",
    server_timeout: ServerTimeout = TIMEOUT_S,
    layers: Layers = "around",
    device: Device = "auto",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    chat_template_kwargs: TemplateKwargs = "",
    seed: Seed = 0,
    fail_on: FailOn = "none",
    json: Json = "",
    out: Out = "",
) -> int:
    """Score one drafter: how many tokens are accepted, where and on which prompts.

    Needs either --target and --prompts, or --capture. Walked numbers are what greedy decoding gets;
    uniform ones are what most training dashboards show. Intervals are 95 %, over prompts.
    """
    from dflash_diag import runs, storage, views

    config, refused = _config(locals()), runs.fail_on(fail_on)
    run = runs.Run.open(config)
    with run.alone():
        scored, text = run.metrics("drafter"), views.score_text(run)
    if json == "-":
        typer.echo(storage.to_json_text(scored), nl=False)
    else:
        if json:
            storage.write_json(json, scored)
        typer.echo(text)
    return _code(run.having(refused, only=runs.SCORE_RESULTS))


@app.command(
    epilog="""
Examples:

  dflash-diag divergence --capture captures/gpu --against captures/cpu --drafter ./step_8000

  dflash-diag divergence --target ./target --prompts p.jsonl --backend fla --against torch/float32

  dflash-diag divergence --capture dump.pt --target ./target
"""
)
def divergence(
    against: Against = "",
    capture: CaptureDir = "",
    target: Target = "",
    prompts: Prompts = "",
    drafter: Drafter = "",
    prompt: OnePrompt = "",
    max_new_tokens: NewTokens = 0,
    overrides: Overrides = [],  # noqa: B006 - typer's way to repeat an option
    layers: Layers = "around",
    device: Device = "auto",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    chat_template_kwargs: TemplateKwargs = "",
    seed: Seed = 0,
    fail_on: FailOn = "none",
    json: Json = "",
    out: Out = "",
) -> int:
    """Compare hidden states: layer by layer, module by module, and by what it costs.

    The states of --capture (or of --target on --prompts) are held against another capture, or
    against another backend or dtype of the live target. The noise floor is the same code in low
    precision against itself in float32. The verdict is noise, harmless difference or cause; with
    --drafter it rests on the accepted tokens. Captures by other code are audited on the way; with
    --capture and --target alone, the capture is held against the live target in float32.
    """
    from dflash_diag import runs, state_runs, storage, views

    if capture and target and not against:
        against = "auto/float32"  # the live target as exactly as it can be computed here
    config, refused = _config(locals()), runs.fail_on(fail_on)
    run = runs.Run.open(config, needs_drafter=False)
    with run.alone():
        found, text = state_runs.divergence_json(run), views.divergence_text(run)
    if json == "-":
        typer.echo(storage.to_json_text(found), nl=False)
    else:
        if json:
            storage.write_json(json, found)
        typer.echo(text)
    return _code(run.having(refused, only=state_runs.RESULTS))


@app.command(
    name="doctor",
    epilog="""
Examples:

  dflash-diag doctor

  dflash-diag doctor --target ./target --drafter ./step_8000 --prompts mine.jsonl

  dflash-diag doctor --capture captures/mine --drafter ./step_8000 --step trainer.py:step

  dflash-diag doctor --capture captures/mine --drafter ./step_8000 --claim dds8=3.58 --json d.json
""",
)
def doctor_verb(
    target: Target = "",
    drafter: Drafter = "",
    reference: Reference = "",
    prompts: Prompts = "",
    max_new_tokens: NewTokens = 0,
    capture: CaptureDir = "",
    against: Against = "",
    overrides: Overrides = [],  # noqa: B006 - typer's way to repeat an option
    served_output: ServedOutput = "",
    claims: Claims = [],  # noqa: B006 - typer's way to repeat an option
    training_log: TrainingLog = "",
    training_sequences: TrainingSequences = "",
    step: Step = "",
    server: ServerUrl = "",
    server_model: ServerModel = "",
    server_timeout: ServerTimeout = TIMEOUT_S,
    layers: Layers = "around",
    device: Device = "auto",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    chat_template_kwargs: TemplateKwargs = "",
    lossless_prompts: LosslessPrompts = 6,
    seed: Seed = 0,
    fail_on: FailOn = "none",
    json: Json = "",
    out: Out = "",
) -> int:
    """Name what is wrong with a drafter, by how much each cause counts, and what to do.

    With no options: the embedded example (but for its training texts, which the report measures
    again). What can fake everything else is checked first (lossless decoding, the captured states),
    then the files, every other reading of the weights, and, where they are given, other captures, a
    training step, and the numbers that a dashboard showed. A
    cause is found, excluded, not identifiable (with what would settle it) or not tested (with the
    reason). Unlike the verb score, it reports checkpoints that cannot be loaded as they are.
    """
    from dflash_diag import runs, storage, views
    from dflash_diag.ahead import ahead

    config, refused = _config(locals()), runs.fail_on(fail_on)
    run = runs.Run.open(config, strict=False, brief=True)
    with run.alone(), ahead(run):
        found = run.doctor()
        result = run.result("doctor.causes") if refused else None
    if json == "-":
        typer.echo(storage.to_json_text(found), nl=False)
    else:
        if json:
            storage.write_json(json, found)
        typer.echo(views.doctor_text(found))
    return _code([result] if result is not None and result.verdict in refused else [])


@app.command(
    epilog="""
Examples:

  dflash-diag audit --step trainer.py:step

  dflash-diag audit --step trainer.py:step --target ./target --training-sequences data/train.jsonl

  dflash-diag audit --step trainer.py:step --capture captures/mine --drafter ./step_8000

The file is run, as its own program would be. step(tokens [T], states [T, K, H], anchors [A],
loss_mask [T], data_seed, noise_seed) returns loss, logits [A, D, V], labels [A, D], weights [A, D]
and target_logits [A, D, V] or None; a sixth value may be a dictionary of reported metrics.
step.layers names the columns of states; the default is the drafter's taps and then the last layer.
"""
)
def audit(
    step: Step = "",
    target: Target = "",
    training_sequences: TrainingSequences = "",
    capture: CaptureDir = "",
    drafter: Drafter = "",
    prompts: Prompts = "",
    device: Device = "auto",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    fail_on: FailOn = "none",
    json: Json = "",
    out: Out = "",
) -> int:
    """Say what one training step does, by running and differentiating it; its source is not read.

    Whether noise reaches the target's logits; whether draft logits depend on the last layer, on
    states at or after the anchor, on other blocks, on labels; which loss it is: labels, weights of
    the slots, and the shares of cross-entropy and KL; whether the loss mask holds, the head is the
    target's and frozen, and reported metrics are what they claim.

    The step is tried on one text: of --training-sequences (its states are computed here), or of
    --capture. With nothing but --step it is one of the embedded example's training texts. Always
    runs anew.
    """
    from dflash_diag import runs, storage, views
    from dflash_diag.audit_runs import audit_of
    from dflash_diag.diagnostics.training_audit import summary, verdict

    config, refused = _config(locals()), runs.fail_on(fail_on)
    run = runs.Run.open(config, strict=False, needs_drafter=False, needs_prompts=False)
    if not run.config.step:
        raise BadInput("no training step", "FILE.py:FUNC", "give --step")
    with run.alone():
        found = audit_of(run, again=True)
    if json == "-":
        typer.echo(storage.to_json_text(found.to_json()), nl=False)
    else:
        if json:
            storage.write_json(json, found.to_json())
        typer.echo(views.audit_text(found))
    judged = verdict(**summary(found))
    if judged.verdict not in refused:
        return DONE
    typer.echo(f"--fail-on met: {judged.verdict.glyph} {judged.verdict}: {judged.reason}", err=True)
    return FAILED


@app.command(
    name="report",
    epilog="""
Examples:

  dflash-diag report

  dflash-diag report --target ./target --drafter ./step_8000 --reference ./published \\
      --prompts mine.jsonl --out reports/step_8000

  dflash-diag report --capture captures/mine --drafter ./step_8000 --fail-on fail
""",
)
def report_verb(
    target: Target = "",
    drafter: Drafter = "",
    reference: Reference = "",
    prompts: Prompts = "",
    max_new_tokens: NewTokens = 0,
    capture: CaptureDir = "",
    against: Against = "",
    prompt: OnePrompt = "",
    overrides: Overrides = [],  # noqa: B006 - typer's way to repeat an option
    served_output: ServedOutput = "",
    claims: Claims = [],  # noqa: B006 - typer's way to repeat an option
    training_log: TrainingLog = "",
    training_sequences: TrainingSequences = "",
    step: Step = "",
    server: ServerUrl = "",
    server_model: ServerModel = "",
    server_timeout: ServerTimeout = TIMEOUT_S,
    layers: Layers = "around",
    device: Device = "auto",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    chat_template_kwargs: TemplateKwargs = "",
    lossless_prompts: LosslessPrompts = 0,
    seed: Seed = 0,
    fail_on: FailOn = "none",
    out: Out = "",
    open_: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open",
            help="Show the report in the browser; the example's is shown unless told otherwise.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
) -> int:
    """Write the HTML report; with no options, that of the embedded example.

    Captures the target if needed, scores the drafters, runs all notebooks and writes a site that
    needs no network: OUT/index.html, and summary.json, junit.xml, results/ and notebooks/ beside
    it. Running the same command again reuses what is there.
    """
    from dflash_diag import report, runs

    config, refused = _config(locals()), runs.fail_on(fail_on)
    run = runs.Run.open(config)
    with run.alone():
        index = report.build(run)
    typer.echo(str(index))
    if _may_open() if open_ is None and run.given.is_example else open_:
        typer.launch(index.resolve().as_uri())
    return _code(run.having(refused))


def _code(failed: Sequence[Result]) -> int:
    """The exit code where ``--fail-on`` refuses some results, which are named."""
    from dflash_diag import views

    for one in failed:
        typer.echo(f"--fail-on met: {views.verdict_line(one)}", err=True)
    return FAILED if failed else DONE


def _config(options: Mapping[str, Any]) -> RunConfig:
    """The options of a verb as a `RunConfig`; its fields have the options' names."""
    from dflash_diag.config import RunConfig

    return RunConfig.read({k: v for k, v in options.items() if k in RunConfig.model_fields})


def _may_open() -> bool:
    """Whether somebody sits in front of a browser."""
    if os.environ.get("CI") or not sys.stdout.isatty():
        return False
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; errors become one line on standard error."""
    signals = _Interruptible()
    try:
        with signals:
            code = app(
                args=None if arguments is None else list(arguments),
                prog_name="dflash-diag",
                standalone_mode=False,
            )
    except DiagError as error:
        kind = "error" if error.exit_code == BAD_INPUT else "stopped"
        return _say(str(error), error.exit_code, kind=kind)
    except typer.TyperException as error:
        return _say(f"{error.format_message()} (see --help)", BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception:
        if not signals.stopped:
            raise
        code = 130
    if code == 130:
        return _say("interrupted; resume with the same command", INTERRUPTED, kind="stopped")
    return code or DONE


def _say(message: str, code: int, kind: str = "error") -> int:
    typer.echo(f"{kind}: {' '.join(message.split())}", err=True)
    return code


class _Interruptible:
    """While it lasts, SIGTERM (a scheduler's stop) is treated like Ctrl-C, and both are remembered.

    A library that is reading a file may turn the interruption into an error of its own.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __enter__(self) -> _Interruptible:
        self.stopped = False
        self._before: dict[int, Any] = {}
        try:
            for one in self.SIGNALS:
                self._before[one] = signal.signal(one, self._interrupt)
        except ValueError:  # not the main thread: signals stay as they are
            pass
        return self

    def __exit__(self, *_: object) -> None:
        for one, before in self._before.items():
            signal.signal(one, before)

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> NoReturn:
        self.stopped = True
        raise KeyboardInterrupt


def main() -> None:
    """Entry point of ``python -m dflash_diag`` and ``dflash-diag``."""
    sys.exit(run())
