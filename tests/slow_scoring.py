"""Scoring written again, slowly: one block at a time, everything recomputed, plain loops.

Shares no code with the package beyond reading the files. Weights are a dict of float tensors, a
reading is a `SimpleNamespace` with the fields of `Convention`.
"""

from __future__ import annotations

import heapq
import math

import torch


def norm(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x, positions, theta, width):
    """Half-split rotary embedding of heads [n, heads, d]."""
    out = x.clone()
    half = width // 2
    for i in range(half):
        angle = positions.to(x.dtype) * theta ** (-2 * i / width)
        cos, sin = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
        low, high = x[..., i], x[..., half + i]
        out[..., i] = low * cos - high * sin
        out[..., half + i] = high * cos + low * sin
    return out


def convolved(x, fixed, computed):
    """Slots [B, H] under taps [K, H] and, per slot and group of channels, taps [B, K, G]."""
    out = torch.zeros_like(x)
    width = x.shape[1] // computed.shape[2]
    for slot in range(x.shape[0]):
        for tap in range(min(fixed.shape[0], slot + 1)):
            scale = fixed[tap] + computed[slot, tap].repeat_interleave(width)
            out[slot] += scale * x[slot - tap]
    return out


def around(x, half, w, name):
    """Half a layer, with its two convolutions if it has them."""
    if f"{name}.base_kernel" not in w:
        return half(x)
    fixed = w[f"{name}.base_kernel"]
    computed = (x @ w[f"{name}.kernel_projection.weight"].T).view(len(x), 2, fixed.shape[1], -1)
    return convolved(half(convolved(x, fixed[0], computed[:, 0])), fixed[1], computed[:, 1])


def one_block(weights, how, tokens, states, anchor, embedding, head):
    """Log-probabilities [D, V] of one block at ``anchor``."""
    rows = block_states(weights, how, tokens, states, anchor, embedding)
    return (rows @ head.T).log_softmax(-1)


def block_states(weights, how, tokens, states, anchor, embedding):
    """What the head reads of one block's proposals: [D, H]."""
    size, hidden_size = how.block_size, weights["norm.weight"].shape[0]
    n_context = anchor + (1 if how.context_bound == "inclusive" else 0)
    features = states[:n_context].reshape(n_context, -1) @ weights["fc.weight"].T
    features = norm(features, weights["hidden_norm.weight"])
    ids = [int(tokens[anchor])] + [how.mask_token_id] * (size - 1)
    x = embedding[ids]
    positions = torch.arange(anchor, anchor + size) + how.position_offset
    for i in range(len(how.in_block)):
        w = {k.split(f"layers.{i}.")[1]: v for k, v in weights.items() if f"layers.{i}." in k}

        def attend(y, w=w, i=i):
            return (
                attention(y, w, how, i, features, positions, anchor)
                @ w["self_attn.o_proj.weight"].T
            )

        def mlp(z, w=w):
            gate, up = z @ w["mlp.gate_proj.weight"].T, z @ w["mlp.up_proj.weight"].T
            return (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T

        x = x + around(norm(x, w["input_layernorm.weight"]), attend, w, "attention_conv")
        x = x + around(norm(x, w["post_attention_layernorm.weight"]), mlp, w, "mlp_conv")
    assert x.shape == (size, hidden_size)
    rows = norm(x, weights["norm.weight"])
    return rows[1:] if how.label_layout == "same" else rows


def attention(y, w, how, i, features, positions, anchor):
    """Layer ``i``'s attention of the block's slots ``y`` [B, H], before the output projection."""
    size, n_context, d = len(y), len(features), how.rotary_width
    q = norm((y @ w["self_attn.q_proj.weight"].T).view(size, -1, d), w["self_attn.q_norm.weight"])
    both = torch.cat([features, y])
    where = torch.cat([torch.arange(n_context), positions])
    k = norm(
        (both @ w["self_attn.k_proj.weight"].T).view(n_context + size, -1, d),
        w["self_attn.k_norm.weight"],
    )
    v = (both @ w["self_attn.v_proj.weight"].T).view(n_context + size, -1, d)
    q, k = rotate(q, positions, how.rope_theta, d), rotate(k, where, how.rope_theta, d)
    seen = torch.ones(size, n_context + size, dtype=torch.bool)
    for slot in range(size):
        for key in range(n_context + size):
            inside = key - n_context
            if key < n_context:
                window = how.window[i]
                if window is None:
                    continue
                far = anchor + slot - key >= window
                if how.window_rule == "anchor":
                    far = key < anchor - window
                seen[slot, key] = not far
            else:
                by_slot = how.window[i] is not None and how.window_rule == "slot"
                seen[slot, key] = not (
                    (how.in_block[i] == "causal" and inside > slot)
                    or (by_slot and abs(inside - slot) >= how.window[i])
                )
    outs = []
    for h in range(q.shape[1]):
        g = h * k.shape[1] // q.shape[1]
        scores = q[:, h] @ k[:, g].T / math.sqrt(d)
        scores[~seen] = -math.inf
        outs.append(scores.softmax(-1) @ v[:, g])
    return torch.stack(outs, 1).reshape(size, -1)


def markov_rows(weights, rows, anchor_token, head, target_ids):
    """Logits [D, V_d] of a block whose slots are biased by the token proposed before."""
    w = {k.removeprefix("markov_head."): v for k, v in weights.items() if k.startswith("markov_")}
    rank = w["markov_w1"].shape[1]
    previous, state, out = anchor_token, torch.zeros(rank), []
    for row in rows:
        before = w["markov_w1"][previous]
        if "gate_proj.weight" in w:
            z = torch.cat([row, before])
            latent = torch.sigmoid(w["gate_proj.weight"] @ z + w["gate_proj.bias"]) * before
        elif "joint_proj.weight" in w:
            z = w["joint_proj.weight"] @ torch.cat([state, before, row]) + w["joint_proj.bias"]
            gate, candidate, latent = z[:rank], z[rank : 2 * rank], torch.tanh(z[2 * rank :])
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
        else:
            latent = before
        out.append(head @ row + w["markov_w2"] @ latent)
        previous = int(target_ids[int(out[-1].argmax())])
    return torch.stack(out)


def selector_rows(weights, rows, anchor_token, head, k):
    """Per slot ``{token: score}`` of the k candidates, after the token chosen before."""
    w = {k.removeprefix("candidate_selector."): v for k, v in weights.items()}
    previous, out = anchor_token, []
    for row in rows:
        logits = head @ row
        projected = w["hidden_projection.weight"] @ row
        scores = {}
        for token in sorted(range(len(head)), key=lambda t, logits=logits: -float(logits[t]))[:k]:
            liked = w["predecessor_codebook"][previous] * projected * w["successor_codebook"][token]
            scores[token] = float(logits[token] + liked.sum())
        out.append(scores)
        previous = max(scores, key=scores.__getitem__)
    return out


def leading(hits):
    return next((i for i, hit in enumerate(hits) if not hit), len(hits))


def tree_depth(logprobs, labels, nodes):
    """Depth of the label path in the tree of the ``nodes`` most probable prefixes."""
    order = [sorted(range(len(row)), key=lambda t, row=row: (-row[t], t)) for row in logprobs]
    ranked = [[row[t] for t in best] for row, best in zip(logprobs, order, strict=True)]
    heap, members = [(-ranked[0][0], (0,))], set()
    while heap and len(members) < nodes:
        cost, path = heapq.heappop(heap)
        members.add(path)
        depth, last = len(path) - 1, path[-1]
        if last + 1 < len(ranked[depth]):
            sibling = cost + ranked[depth][last] - ranked[depth][last + 1]
            heapq.heappush(heap, (sibling, (*path[:-1], last + 1)))
        if depth + 1 < len(ranked):
            heapq.heappush(heap, (cost - ranked[depth + 1][0], (*path, 0)))
    path, depth = (), 0
    for slot, label in enumerate(labels):
        path = (*path, order[slot].index(label))
        if path not in members:
            break
        depth += 1
    return depth


def walk(first, last, jumps):
    """Anchors that decoding visits, and what each round commits."""
    rounds, at = [], first
    while at <= last:
        rounds.append((at, jumps[at]))
        at += jumps[at]
    return rounds


def mean(values):
    return sum(values) / len(values)


def summary(blocks, prompts, n_proposed):
    """Every number of ``score --json`` that is no interval.

    ``blocks`` is ``{prompt id: {anchor: (log-probabilities as lists, labels)}}``.
    """
    accepted, oracle, trees = {}, {}, {}
    right = {}
    for name, anchors in blocks.items():
        for a, (rows, labels) in anchors.items():
            best = [max(range(len(r)), key=r.__getitem__) for r in rows]
            right[name, a] = [b == y for b, y in zip(best, labels, strict=True)]
            accepted[name, a] = leading(right[name, a])
            ranks = [
                sum(v > r[y] or (v == r[y] and t < y) for t, v in enumerate(r))
                for r, y in zip(rows, labels, strict=True)
            ]
            oracle[name, a] = {k: leading([x < k for x in ranks]) for k in (1, 4, 8)}
            trees[name, a] = {n: tree_depth(rows, labels, n) for n in (1, 4, 8)}
    rounds = {
        name: walk(*prompts[name], {a: accepted[name, a] + 1 for a in anchors})
        for name, anchors in blocks.items()
    }
    per_prompt = {name: [length for _, length in walked] for name, walked in rounds.items()}
    visited = [(name, a) for name, walked in rounds.items() for a, _ in walked]
    uniform = {name: [accepted[name, a] + 1 for a in anchors] for name, anchors in blocks.items()}
    everything = list(accepted)
    marginal = [mean([right[b][k] for b in everything]) for k in range(n_proposed)]
    survival = [mean([accepted[b] > k for b in everything]) for k in range(n_proposed)]
    return {
        "n_anchors": len(everything),
        "n_rounds": len(visited),
        "tau": {
            "walked_micro": mean([accepted[b] + 1 for b in visited]),
            "walked_macro": mean([mean(r) for r in per_prompt.values()]),
            "uniform_micro": mean([accepted[b] + 1 for b in everything]),
            "uniform_macro": mean([mean(r) for r in uniform.values()]),
        },
        "streak": {
            "walked": mean([accepted[b] for b in visited]),
            "uniform": mean([accepted[b] for b in everything]),
        },
        "marginal": marginal,
        "survival": survival,
        "conditional": [
            s / before if before else None
            for s, before in zip(survival, [1.0, *survival], strict=False)
        ],
        "ddtree_tau": {str(n): 1 + mean([trees[b][n] for b in everything]) for n in (1, 4, 8)},
        "topk_oracle": {str(k): mean([oracle[b][k] for b in everything]) for k in (1, 4, 8)},
        "rounds": per_prompt,
    }
