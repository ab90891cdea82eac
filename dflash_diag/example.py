"""The embedded example: where its parts lie, and that they are what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_diag import paths, storage
from dflash_diag.errors import BadInput
from dflash_diag.prompts import Prompt, read_prompts

MANIFEST = "manifest.json"
SCHEMA = "dflash_diag.zoo/1"
_AGAIN = "check the repository out again"


@dataclass(frozen=True)
class Example:
    """A target, a drafter to judge, one to compare with, and the prompts of the default report."""

    target: str = "zoo/hybrid/target"
    drafter: str = "zoo/hybrid/drafters/anchor_included"
    reference: str = "zoo/hybrid/drafters/reference"
    training_sequences: str = "zoo/hybrid/sequences"
    training_log: str = "zoo/hybrid/drafters/anchor_included/training_log.jsonl"
    prompts: tuple[tuple[str, int], ...] = (
        ("prompts/coding.jsonl", 10),
        ("prompts/general.jsonl", 14),
    )
    """Files, and how many prompts are taken from the start of each."""
    against: tuple[str, ...] = (
        "zoo/captures/h200-fla-bfloat16",
        "zoo/captures/h200-torch-bfloat16",
        "zoo/captures/h200-fla-float32",
        "torch/bfloat16",
    )
    """What the captured states are compared with: captures, or backends with a dtype."""
    max_new_tokens: int = 64
    """G at which at most 30 % of the lines of the median completion are repeated."""
    step: str = "anchor_included"
    """Function of ``zoo/steps.py`` that is the training step of the drafter to judge."""

    def part(self, name: str) -> Path:
        """Path of one of its parts, verified against the manifest.

        Raises
        ------
        BadInput
            It is not there, or its content is not what was measured.
        """
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

    def step_spec(self) -> str:
        """`step` as an option has it."""
        return f"{Path(__file__).parent / 'zoo' / 'steps.py'}:{self.step}"

    def read_prompts(self) -> list[Prompt]:
        """The prompts of the default report."""
        return [
            prompt
            for name, count in self.prompts
            for prompt in read_prompts(paths.data_dir() / name)[:count]
        ]


EXAMPLE = Example()


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
