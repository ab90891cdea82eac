"""A trainer in miniature whose faults are switches: what an audit has to see from outside."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional as F

from dflash_diag.training_audit import Material

V, H, T, D, LAST = 40, 12, 96, 5, 7
LAYERS = (1, 3, 5, LAST)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


HEAD = torch.randn(V, H, generator=generator(1))


def material(**changes) -> Material:
    g = generator(0)
    states = torch.randn(T, len(LAYERS), H, generator=g)
    tokens = torch.randint(0, V, (T,), generator=g)
    # What the target says after each token: mostly the text's own next one.
    states[:-1, -1] = 4 * HEAD[tokens[1:]] / HEAD[tokens[1:]].norm(dim=-1, keepdim=True)
    states[:, -1] += 0.1 * torch.randn(T, H, generator=g)
    made = Material(
        tokens=tokens,
        states=states,
        layer_ids=LAYERS,
        anchors=(16, 27, 40, 52, 66, 80),
        loss_mask=torch.arange(T) >= 12,
        last_layer=LAST,
        taps=LAYERS[:-1],
        head=HEAD,
        text="a made-up text",
    )
    return replace(made, **changes)


@dataclass(eq=False)
class Trainer:
    """One step; every field is right by default."""

    taps: tuple[int, ...] = (0, 1, 2)
    bound: int = 0
    """Rows at or after the anchor that are read: 1 is the anchor's own."""
    later_blocks: bool = False
    label_offset: int = 0
    mask_offset: int = 0
    gamma: float | None = 4.0
    share: float = 0.0
    temperature: float = 1.0
    noise: float = 0.0
    noise_on_target: float = 0.0
    target_offset: int = 0
    gives_target: bool = True
    detached: bool = False
    """The features are, so that no gradient shows what is read."""
    labels_as_input: bool = False
    mask_as_input: bool = False
    ignores_mask: bool = False
    trains_head: bool = False
    own_head: bool = False
    positions: bool = True
    dtype: torch.dtype = torch.float32
    loss: object = None
    """A function of z, t, labels, weights in place of the mixture."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = generator(5)
        self.parameters = {
            "fc": torch.randn(len(self.taps) * H, H, generator=g) / 6,
            "slots": torch.randn(D, H, generator=g),
            "embedding": torch.randn(V, H, generator=g) / 2,
        }
        for one in self.parameters.values():
            one.requires_grad_()
        self.parameters["embedding"].requires_grad_(False)
        # Rows are not alike: a drafter knows positions.
        self.place = torch.linspace(0.5, 1.5, T) if self.positions else torch.ones(T)
        self.head = torch.randn(V, H, generator=g) if self.own_head else HEAD.clone()
        self.head.requires_grad_(self.trains_head)

    def features(self, states, anchors, noise_seed):
        drawn = torch.randn(states.shape, generator=generator(noise_seed))
        x = (states + self.noise * drawn)[:, list(self.taps)].flatten(1) @ self.parameters["fc"]
        x = x.detach() if self.detached else x
        x = x * self.place[: len(x), None]
        at = [x[: a + self.bound].mean(0) if self.bound < 9 else x.mean(0) for a in anchors]
        return torch.stack(at)

    def target(self, states, rows, noise_seed):
        drawn = torch.randn(states.shape, generator=generator(noise_seed))
        last = (states + self.noise_on_target * drawn)[:, -1].detach()
        return last[rows - 1] @ HEAD.T

    def __call__(self, tokens, states, anchors, loss_mask, data_seed, noise_seed):
        p, k = self.parameters, torch.arange(1, D + 1)
        rows = anchors[:, None] + k + self.label_offset
        hidden = (
            self.features(states, anchors.tolist(), noise_seed) + p["embedding"][tokens[anchors]]
        )
        if self.later_blocks:
            later = p["embedding"][tokens[anchors]].flip(0).cumsum(0).flip(0)
            hidden = hidden + later - p["embedding"][tokens[anchors]]
        hidden = torch.tanh(hidden[:, None] + p["slots"])
        if self.labels_as_input:
            hidden = hidden + 0.05 * p["embedding"][tokens[rows]]
        if self.mask_as_input:
            hidden = hidden * (1 + 0.1 * loss_mask[rows])[..., None]
        z = (hidden @ self.head.T).to(self.dtype)
        t = self.target(states, rows + self.target_offset, noise_seed)
        labels = t.argmax(-1) if self.noise_on_target else tokens[rows]
        decay = torch.ones(D) if self.gamma is None else torch.exp(-(k - 1) / self.gamma)
        mask = loss_mask[rows + self.mask_offset]
        weights = decay * (torch.ones_like(mask) if self.ignores_mask else mask)
        loss = (self.loss or self.mixture)(z.float(), t, labels, weights)
        return loss, z, labels, weights, t if self.gives_target else None

    def mixture(self, z, t, labels, weights):
        hot = self.temperature
        ce = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        kl = F.kl_div(
            (z / hot).log_softmax(-1), (t / hot).log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        each = (1 - self.share) * ce + self.share * hot**2 * kl
        return (each * weights).sum() / weights.sum()
