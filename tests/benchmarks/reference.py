"""What `target.reference` says of servers that differ: ``python tests/benchmarks/reference.py``.

A server on this machine gives the greedy text of the example's hybrid target after a change: other
precision, weights rounded to few bits (groups of 64 or a row, every linear layer but the head),
another prompt than was sent, or text that is drawn. States and choices are the target's own.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving import FaultyServer
from stamp import stamp

from dflash_diag import make_capture
from dflash_diag.decoding import greedy
from dflash_diag.diagnostics import get
from dflash_diag.example import EXAMPLE
from dflash_diag.references import check_reference
from dflash_diag.servers import Server
from dflash_diag.targets import load_target, wrap_target

G, GROUP, DRAWS = 64, 64, 20_000


def rounded(target, bits: int):
    """The target with weights in ``bits`` bits."""
    model = copy.deepcopy(target.model)
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear) or "lm_head" in name:
            continue
        width = layer.weight.shape[1]
        groups = layer.weight.data.unflatten(1, (-1, GROUP if width % GROUP == 0 else width))
        step = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        layer.weight.data = ((groups / step).round() * step).flatten(1)
    return wrap_target(model, source=target.source, folder=target.folder)


def drawn(target, prompt: list[int]) -> list[int]:
    """Text at temperature 1."""
    cache, ids, new = target.caches.new(), [], list(prompt)
    for _ in range(G):
        logits = target.logits(torch.tensor([new]), cache=cache, last_only=True)[0, -1]
        new = [int(torch.multinomial(logits.float().softmax(-1), 1))]
        ids += new
    return ids


@torch.inference_mode()
def main() -> None:
    target = load_target(EXAMPLE.part(EXAMPLE.target))
    prompts = EXAMPLE.read_prompts()
    sent = [target.encode(prompt) for prompt in prompts]
    half = wrap_target(
        copy.deepcopy(target.model).bfloat16(), source=target.source, folder=target.folder
    )
    torch.manual_seed(0)

    def text(writer=target, change=lambda ids: ids):
        return [one.ids for one in greedy(writer, [change(ids) for ids in sent], G)]

    servers = {
        "the same": text,
        "bfloat16": lambda: text(half),
        **{f"weights in {n} bits": (lambda n=n: text(rounded(target, n))) for n in (8, 6, 4, 3)},
        "prompt without its last token": lambda: text(change=lambda ids: ids[:-1]),
        "a token more after the prompt": lambda: text(change=lambda ids: [*ids, ids[0]]),
        "drawn at temperature 1": lambda: [drawn(target, ids) for ids in sent],
    }
    print(stamp())
    print(f"{len(prompts)} prompts of {G} tokens; tokens beyond rounding with a 95 % interval")
    for name, write in servers.items():
        texts = {tuple(ids): made for ids, made in zip(sent, write(), strict=True)}
        with (
            tempfile.TemporaryDirectory() as folder,
            FaultyServer("vllm", lambda p, n, texts=texts: texts[tuple(p)][:n]) as server,
        ):
            made = make_capture(
                target,
                prompts,
                Path(folder) / "capture",
                max_new_tokens=G,
                layers="taps",
                reference=Server(server.url),
                silent=True,
            )
            check = check_reference(made)
        inputs = SimpleNamespace(
            seed=0, draws=DRAWS, reference=lambda check=check: check, provenance=dict
        )
        found = get("target.reference")(inputs)
        differ, p = found.estimates["share_differ"], found.params
        print(
            f"{name:<30} equal {100 * found.estimates['share_equal'].value:5.1f} %  "
            f"beyond {100 * differ.value:5.2f} % [{100 * differ.lo:5.2f}, {100 * differ.hi:5.2f}]  "
            f"first token {p['n_from_start']:2d}/{p['n_prompts']}  {found.verdict.name}",
            flush=True,
        )


if __name__ == "__main__":
    main()
