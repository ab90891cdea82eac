"""Whether the tapped layers exist, are told apart, and are those that the files declare."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_diag.static_audit.material import Checked, Material, Severity, StaticFinding, listed

_OUTPUT_IDS = ("target_layer_ids", "dspark_target_layer_ids")
_INPUT_IDS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids", "layer_ids")


def check_layers(m: Material) -> Checked:
    """Tapped layers exist, are told apart, and are those that the files declare."""
    how, n, taps = m.convention, m.n_layers, m.convention.taps
    found = [*_declared_layers(m)]
    columns = fc_taps(m)
    if columns not in (None, len(taps)):
        text = f"fc reads {columns} tapped layers, {len(taps)} are listed."
        cause = "layers.missing_or_default"
        found.append(StaticFinding(cause, "fail", text, {"fc": columns, "listed": len(taps)}))
    if not m.stated("layer_ids"):
        text = (
            f"No key lists the tapped layers; {listed(how.layer_ids)} follow from z-lab's formula, "
            "and servers take other defaults."
        )
        cause = "layers.missing_or_default"
        found.append(StaticFinding(cause, "warn", text, {"used": list(how.layer_ids)}))
    if list(taps) != sorted(taps):
        text = (
            f"Tapped layers are listed as {listed(how.layer_ids)}; vLLM sorts them and SGLang "
            "captures them ascending, fc here reads them as listed."
        )
        found.append(StaticFinding("layers.order", "note", text, {"ids": list(how.layer_ids)}))
    outside = [i for i in taps if i < -1 or (n is not None and i >= n)]
    if outside:
        said = f"outputs of the target's {n} layers" if n is not None else "layers"
        text = f"Tapped layer {listed(outside)} is none of the {said}."
        found.append(StaticFinding("layers.offset", "fail", text, {"outside": outside}))
    if -1 in taps and how.layer_id_rule == "output":
        text = (
            "Tapped layer -1 is the embedding for DeepSpec and z-lab, and the last layer for code "
            "that counts from the end."
        )
        found.append(StaticFinding("layers.offset", "warn", text, {"ids": list(how.layer_ids)}))
    if n is not None and n - 1 in taps:
        found += _last_layer(m, n)
    untested = [] if n is not None else ["how many layers the target has is not known"]
    return Checked(
        "tapped layers",
        f"outputs of layers {listed(taps)}" + (f" of {n}" if n is not None else ""),
        "distinct layers of the target, listed in the files, the last one not among them",
        found,
        untested,
    )


def _last_layer(m: Material, n: int) -> Iterator[StaticFinding]:
    text = (
        f"The target's last layer, {n - 1}, is among fc's inputs: SGLang does not capture it, and "
        "stacks differ on whether they read it before or after the final norm."
    )
    yield StaticFinding("layers.last_layer_in_fc", "warn", text, {"layer": n - 1, "delta": None})
    if not m.stated("last_layer_normed"):
        text = (
            f"No key states how layer {n - 1} is read: transformers' hidden_states have it after "
            "the final norm, hooks and vLLM before. This reading takes it "
            f"{'after' if m.convention.last_layer_normed else 'before'}."
        )
        yield StaticFinding("layers.last_layer_norm", "note", text, {"layer": n - 1})


def _declared_layers(m: Material) -> Iterator[StaticFinding]:
    """Lists of layers that are not the ones used, as outputs of decoder layers."""
    used = m.convention.taps
    shift = dict.fromkeys(_OUTPUT_IDS, 0) | dict.fromkeys(_INPUT_IDS, 1)
    declared = m.declared(*shift)
    trained = (m.checkpoint.training_args or {}).get("target_layer_ids")
    if m.convention.layer_id_rule == "output":
        declared["training arguments.target_layer_ids"] = trained
    for key, ids in declared.items():
        if not isinstance(ids, list | tuple) or not all(isinstance(i, int) for i in ids):
            continue
        taps = tuple(i - shift[key.rpartition(".")[2]] for i in ids)
        if taps == used:
            continue
        apart = {b - a for a, b in zip(taps, used, strict=False)}
        if len(taps) == len(used) and len(apart) == 1:
            cause = "layers.offset"
        else:
            same = sorted(taps) == sorted(used)
            cause = "layers.order" if same else "checkpoint.config_contradiction"
        text = f"{key} means layers {listed(taps)}, layers {listed(used)} are read."
        severity: Severity = "note" if m.overridden("layer_ids") else "warn"
        yield StaticFinding(cause, severity, text, {"key": key, "ids": list(ids)})


def fc_taps(m: Material) -> int | None:
    """Tapped layers that fc has columns for; None where they cannot be counted.

    A layer is as wide as the target, or as the checkpoint declares it; where one of the two gives
    the number that is listed, it is that.
    """
    if "fc.weight" not in m.checkpoint.tensors:
        return None
    shape = m.checkpoint.tensors["fc.weight"].shape
    widths = [m.target.get("hidden_size"), m.body.get("target_hidden_size")]
    widths.append(m.body.get("hidden_size"))
    counts = [
        int(shape[1]) // width
        for width in widths
        if len(shape) == 2 and isinstance(width, int) and width > 0 and shape[1] % width == 0
    ]
    listed_count = len(m.convention.taps)
    return listed_count if listed_count in counts else next(iter(counts), None)
