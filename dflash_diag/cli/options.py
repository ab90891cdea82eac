"""What verbs have in common: their options, each written once, and how they end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dflash_diag.config import RunConfig
    from dflash_diag.results import Result

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 3

INPUTS, MACHINE, OUTPUT = "What to measure", "How to run it", "What comes out"


def option(help_: str, *names: str, metavar: str, panel: str, **more: Any) -> Any:
    """An option of a verb."""
    return typer.Option(*names, help=help_, metavar=metavar, rich_help_panel=panel, **more)


Example = Annotated[
    str,
    option(
        "Embedded example that is meant where nothing of your own is named: hybrid, trained for "
        "it, or smollm2, a public chat model that is installed beside it.",
        metavar="NAME",
        panel=INPUTS,
    ),
]
Target = Annotated[
    str,
    option(
        "Target: a transformers folder, a GGUF file, or a hub id.",
        metavar="DIR|FILE.gguf|ID",
        panel=INPUTS,
    ),
]
Drafter = Annotated[
    str,
    option(
        "Drafter: a folder with config.json and model.safetensors, or a .pt file.",
        metavar="PATH",
        panel=INPUTS,
    ),
]
Reference = Annotated[str, option("Another drafter to compare with.", metavar="PATH", panel=INPUTS)]
Prompts = Annotated[
    str,
    option(
        'Lines {"id", "text"}, {"id", "messages"} or {"id", "prompt_ids"}.',
        metavar="FILE.jsonl",
        panel=INPUTS,
    ),
]
NewTokens = Annotated[
    int,
    option(
        "G: tokens that the target generates for each prompt.",
        "--max-new-tokens",
        metavar="G",
        panel=INPUTS,
        show_default="128",
    ),
]
CaptureDir = Annotated[
    str,
    option("Use this capture; the target is then not needed.", metavar="DIR", panel=INPUTS),
]
Against = Annotated[
    str,
    option(
        "Compare states with this: a capture of the same tokens, or BACKEND/DTYPE, such as "
        "torch/bfloat16; several are separated by commas.",
        metavar="DIR|BACKEND/DTYPE",
        panel=INPUTS,
    ),
]
OnePrompt = Annotated[
    str,
    option(
        "Prompt on which modules are compared; the first unless given.", metavar="ID", panel=INPUTS
    ),
]
Overrides = Annotated[
    list[str],
    option(
        "Read the drafter differently, e.g. --set context_bound=inclusive. Repeatable.",
        "--set",
        metavar="FIELD=VALUE",
        panel=INPUTS,
    ),
]
LosslessPrompts = Annotated[
    int,
    option(
        "Decode this many prompts, spread over all of them, for the lossless check; 0: all.",
        metavar="N",
        panel=MACHINE,
    ),
]
ServedOutput = Annotated[
    str,
    option(
        'A server\'s greedy output to check: lines {"id", "output_ids" or "text"}.',
        metavar="FILE.jsonl",
        panel=INPUTS,
    ),
]
Claims = Annotated[
    list[str],
    option(
        "A number that a dashboard or a colleague gave, e.g. --claim dds8=3.58. Repeatable.",
        "--claim",
        metavar="NAME=VALUE",
        panel=INPUTS,
    ),
]
TrainingLog = Annotated[
    str,
    option(
        "Log of the training: CSV, JSONL, a TensorBoard folder or a Weights & Biases export.",
        metavar="FILE",
        panel=INPUTS,
    ),
]
TrainingSequences = Annotated[
    str,
    option(
        "Texts of the training, to measure it again: a folder or a .safetensors with tokens and "
        "prefix or loss_mask, or JSONL.",
        metavar="PATH",
        panel=INPUTS,
    ),
]
TrainingRows = Annotated[
    int,
    option(
        "Measure so many of the training's texts again, of each split; 0: 32.",
        metavar="N",
        panel=INPUTS,
    ),
]
TrainedStates = Annotated[
    str,
    option(
        "How training computed the target's states, such as fla/bfloat16; with training texts its "
        "part of the gap is measured.",
        metavar="BACKEND/DTYPE",
        panel=INPUTS,
    ),
]
Step = Annotated[
    str,
    option("One training step to audit, as a function.", metavar="FILE.py:FUNC", panel=INPUTS),
]
Beside = Annotated[
    list[str],
    option(
        "Another drafter, or the folder of a finished run, to compare with. Repeatable.",
        "--beside",
        metavar="PATH",
        panel=INPUTS,
    ),
]
History = Annotated[
    str,
    option(
        "history.parquet of a watched folder: the checkpoints so far, for the trend.",
        metavar="FILE",
        panel=INPUTS,
    ),
]
ServerUrl = Annotated[
    str,
    option(
        "Take the continuations from this server (SGLang, vLLM, transformers serve).",
        "--server",
        metavar="URL",
        panel=INPUTS,
    ),
]
ServerModel = Annotated[
    str,
    option("The model's name there, if it has several.", metavar="NAME", panel=INPUTS),
]
ServerTimeout = Annotated[
    float,
    option(
        "Seconds for a server to be ready, and for one prompt.",
        metavar="S",
        panel=MACHINE,
    ),
]
TemplateKwargs = Annotated[
    str,
    option("For the tokenizer's chat template.", metavar="JSON", panel=INPUTS),
]
Render = Annotated[
    list[str],
    option(
        "Render the chat prompts otherwise too, and say what it costs: off (no template), or "
        "system=TEXT (another system prompt). Repeatable; each writes the answers anew.",
        metavar="off|system=TEXT",
        panel=INPUTS,
    ),
]
Layers = Annotated[
    str,
    option(
        "States to keep: the tapped layers, also their neighbours, or all.",
        metavar="taps|around|all",
        panel=MACHINE,
    ),
]
Device = Annotated[
    str,
    option(
        "Where to compute; split spreads a large target over all GPUs, then memory, then disk.",
        metavar="auto|cpu|cuda|split",
        panel=MACHINE,
    ),
]
Dtype = Annotated[
    str,
    option(
        "auto: float32 on a CPU, the checkpoint's on a GPU.",
        metavar="auto|float32|bfloat16|float16",
        panel=MACHINE,
    ),
]
Backend = Annotated[
    str,
    option(
        "Code for the target's linear-attention layers: auto, fla or torch; add +chunked or "
        "+recurrent, +causal-conv1d or +torch-conv to say more.",
        metavar="auto|fla|torch",
        panel=MACHINE,
    ),
]
Compiled = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="On a GPU, compile the drafter's layers: half a minute at first, then faster.",
        rich_help_panel=MACHINE,
    ),
]
Seed = Annotated[int, option("Of the resampling.", metavar="S", panel=MACHINE)]
FailOn = Annotated[
    str,
    option(
        "Exit with 1 when a verdict is this bad.",
        "--fail-on",
        metavar="none|warn|fail",
        panel=OUTPUT,
    ),
]
Json = Annotated[
    str,
    option("Write the numbers here too; - is standard output.", metavar="FILE", panel=OUTPUT),
]
Out = Annotated[str, option("Folder for everything that is kept.", metavar="DIR", panel=OUTPUT)]


def code_of(failed: Sequence[Result]) -> int:
    """The exit code where ``--fail-on`` refuses some results, which are named."""
    from dflash_diag import views

    for one in failed:
        typer.echo(f"--fail-on met: {views.verdict_line(one)}", err=True)
    return FAILED if failed else DONE


def config_of(options: Mapping[str, Any]) -> RunConfig:
    """The options of a verb as a `RunConfig`; its fields have the options' names."""
    from dflash_diag.config import RunConfig

    return RunConfig.read({k: v for k, v in options.items() if k in RunConfig.model_fields})


def may_open() -> bool:
    """Whether somebody sits in front of a browser."""
    if os.environ.get("CI") or not sys.stdout.isatty():
        return False
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
