"""What a run measures about hidden states: other sides to compare with, and the audit.

A *side* is another capture of the same tokens, or another way of computing them (a backend and a
dtype), which is captured when it is first asked for. Everything is kept in the run's folder:

::

    OUT/captures/KEY/            a side that was computed here
    OUT/divergence/KEY.json      one comparison: layers, modules, flips
    OUT/state_checks/KEY.json    the audit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_diag import storage
from dflash_diag.diagnostics.base import DRAFTER, Skip, layer_names
from dflash_diag.errors import BadInput, CaptureError, CheckpointError
from dflash_diag.progress import progress

if TYPE_CHECKING:
    from dflash_diag.bundle import Capture
    from dflash_diag.modules import Variant
    from dflash_diag.runs import Run
    from dflash_diag.scoring import Scores

SCHEMA = "dflash_diag.divergence/1"
STATE_CHECKS = (
    "hidden.rows",
    "hidden.argmax",
    "hidden.identity",
    "hidden.batch",
    "hidden.padding",
    "hidden.packing",
    "hidden.chunks",
    "hidden.decode",
)
"""Diagnostics of the audit."""
RESULTS = (
    "hidden.divergence",
    "hidden.effect",
    "hidden.modules",
    "target.reference",
    *STATE_CHECKS,
)
"""Diagnostics that the verb divergence looks at."""
FLOOR_PROMPTS = 4
"""Prompts on which the noise floor of the layers is measured."""


@dataclass(frozen=True, eq=False)
class Side:
    """Something that the run's capture is compared with."""

    name: str
    spec: str
    """The folder, or the backend and dtype, that was given."""
    is_capture: bool


class StateRun:
    """The hidden-state part of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._floors: dict[tuple[Variant, Variant], Mapping[Any, Any]] = {}

    @cached_property
    def sides(self) -> dict[str, Side]:
        """Sides by name, in the order given (``--against``).

        Raises
        ------
        BadInput
            Neither a capture nor a backend with a dtype, or twice the same.
        """
        found: dict[str, Side] = {}
        for spec in filter(None, self._run.config.against.split(",")):
            side = self._side(spec)
            if side.name in found:
                raise BadInput(f"--against names {side.name} twice", "each once")
            found[side.name] = side
        return found

    def _side(self, spec: str) -> Side:
        path = Path(spec)
        if path.exists():
            return Side(path.name, spec, is_capture=True)
        from dflash_diag.modules import Variant

        if not self._run.config.target:
            raise BadInput(
                f"--against {spec}: no such capture",
                "a capture; with --target also a backend to compute it with",
            )
        dtype = self._run.config.dtype
        wanted = spec if "/" in spec or dtype == "auto" else f"{spec}/{dtype}"
        try:
            return Side(wanted, str(Variant.parse(wanted)), is_capture=False)
        except BadInput as error:
            raise BadInput(
                f"--against {spec}",
                "a capture's folder, or a backend and a dtype, such as torch/bfloat16",
                "give --dtype, or the dtype after a slash",
            ) from error

    @property
    def _own(self) -> Variant:
        """How the run's own capture was computed."""
        from dflash_diag.pairs import capture_variant

        return capture_variant(self._run.capture)

    def variant(self, name: str = "") -> Variant | None:
        """How a side, or the run's own capture, was computed; None where it does not say."""
        from dflash_diag.modules import Variant
        from dflash_diag.pairs import capture_variant

        if name and not self.sides[name].is_capture:
            return Variant.parse(self.sides[name].spec)
        capture = self.capture(name) if name else self._run.capture
        return None if capture.foreign else capture_variant(capture)

    @property
    def own_name(self) -> str:
        """What the run's own capture is called: its folder, or how it was computed."""
        run = self._run
        return run.capture.path.name if run.config.capture else str(self._own)

    def capture(self, name: str) -> Capture:
        """The capture of one side, made if it is not there.

        Raises
        ------
        BadInput
            It is of another target, or the backend cannot be used here.
        """
        from dflash_diag.bundle import Capture

        side, run = self.sides[name], self._run
        if side.is_capture:
            return Capture.load(side.spec, target=run.config.target or None)
        from dflash_diag.capture import make_capture
        from dflash_diag.modules import Variant, computed_as

        folder = run.out / "captures" / self._key("side/2", side.spec)

        def make() -> None:
            with computed_as(run.target, Variant.parse(side.spec)) as target:
                make_capture(
                    target,
                    [],
                    folder,
                    like=run.capture,
                    layers="taps",
                    taps=run.capture.layer_ids,
                    all_layers_for=run.capture.facts.get("all_layers_for", 0),
                )

        storage.made_once(folder / "manifest.json", make)
        return Capture.load(folder, verify=False)

    def scores(self, name: str) -> tuple[Scores, Scores]:
        """The judged drafter's scores on the run's own capture and on a side.

        Raises
        ------
        Skip
            No drafter, or states of which no scores can be made.
        """
        run = self._run
        if DRAFTER not in run.roles:
            raise Skip("No drafter was given (--drafter), so the cost in tokens is unknown.")
        from dflash_diag.pairs import shared_prompts

        capture = self.capture(name)
        if run.capture.thinned or capture.thinned:
            raise Skip(
                "A capture that keeps only some positions cannot be scored, so the cost in tokens "
                "is unknown."
            )
        parted = [pair for pair in shared_prompts(run.capture, capture) if not pair.same]
        if parted:
            raise Skip(
                f"{len(parted)} continuations differ (capture --like gives the same tokens), so "
                "the cost in tokens is unknown."
            )
        for who, one in ((self.own_name, run.capture), (name, capture)):
            lacking = set(run.convention(DRAFTER).taps) - set(one.layer_ids)
            if lacking:
                raise Skip(
                    f"{who} lacks {layer_names(lacking)}, which the drafter taps, so the cost in "
                    "tokens is unknown."
                )
        try:
            return run.scores(DRAFTER), run.scores_on(capture, DRAFTER)
        except CheckpointError:
            raise
        except BadInput as error:
            raise Skip(f"The cost in tokens is unknown: {error}.") from error

    def compute(self) -> None:
        """Everything that is not there yet."""
        for name in self.sides:
            self.divergence(name)
        self.checks()

    # --- the comparison ---------------------------------------------------------------------------

    def divergence(self, name: str) -> Mapping[str, Any]:
        """One comparison: ``layers``, ``prompts``, ``modules``, ``flips``, and notes on them."""
        key = self._key("divergence/3", self.sides[name].spec, self._digest(name), self._prompt)
        path = self._run.out / "divergence" / f"{key}.json"
        if not path.is_file():
            storage.write_json(path, self._diverge(name))
        found: Mapping[str, Any] = storage.read_json(path)
        return found

    @cached_property
    def digests(self) -> list[str]:
        """Hashes of what the captures among the sides hold."""
        return [self._digest(name) for name in self.sides]

    def _digest(self, name: str) -> str:
        side = self.sides[name]
        return self._run.digest_of(self.capture(name)) if side.is_capture else ""

    def _diverge(self, name: str) -> dict[str, Any]:
        from dflash_diag.divergence import with_floor
        from dflash_diag.pairs import layer_deviations, left_out, target_flips

        run, other = self._run, self.capture(name)
        prompts: list[dict[str, Any]] = []
        deviations = layer_deviations(run.capture, other, each=prompts.append)
        kinds = run.capture.target_facts.get("layer_types") or []
        for row in deviations:
            row["kind"] = kinds[row["layer"]] if 0 <= row["layer"] < len(kinds) else None
        floor, note = self._layer_floor(other)
        modules, why = self._modules(name, other)
        comparable = not (run.capture.foreign or other.foreign)
        return {
            "layers": with_floor(deviations, floor),
            "prompts": prompts,
            "floor_note": note,
            "modules": modules,
            "modules_note": why,
            "left_out": left_out(run.capture, other),
            "flips": target_flips(run.capture, other) if comparable else [],
        }

    def _variants(self, other: Capture) -> tuple[Variant, Variant]:
        """How both captures were computed; a side that does not say is taken to be as ours."""
        from dflash_diag.pairs import capture_variant

        own = None if self._run.capture.foreign else self._own
        theirs = None if other.foreign else capture_variant(other)
        target = self._run.target
        default = self._default_variant(target)
        return own or default, theirs or own or default

    @staticmethod
    def _default_variant(target: Any) -> Variant:
        from dflash_diag.modules import Variant

        dtype = str(target.dtype).removeprefix("torch.")
        return Variant(target.backend.wish, dtype)

    def _layer_floor(self, other: Capture) -> tuple[Mapping[Any, Any] | None, str]:
        """The noise floor of the layers, and how it was come by."""
        run = self._run
        if not run.config.target:
            return None, "Noise floor: assumed, a relative RMS of 0.01 (give --target to measure)."
        from dflash_diag.localization import noise_variants
        from dflash_diag.modules import Variant, computed_as
        from dflash_diag.pairs import layer_floor

        ours, theirs = self._variants(other)
        low, high = noise_variants(ours, theirs)
        sequences = [run.capture.tokens(i).tolist() for i in range(len(run.capture))]
        sequences = sequences[:FLOOR_PROMPTS]
        own = run.target.backend.wish
        for backend in dict.fromkeys((theirs.backend, own)):
            pair = Variant(backend, low.dtype), Variant(backend, high.dtype)
            said = f"Noise floor: {pair[0]} against {pair[1]}, over {len(sequences)} prompts."
            if pair in self._floors:
                return self._floors[pair], said
            try:
                with computed_as(run.target, pair[1]):
                    pass
            except BadInput:
                continue  # that backend cannot be used here
            with progress(2 * len(sequences), "noise floor", unit="forward") as stage:
                found = layer_floor(run.target, pair, sequences, tick=stage.update)
            self._floors[pair] = found
            return found, said
        return None, "Noise floor: assumed, a relative RMS of 0.01 (it cannot be measured here)."

    @property
    def _prompt(self) -> str:
        """Id of the prompt whose modules are looked at."""
        run = self._run
        if run.config.prompt:
            run.capture.index(run.config.prompt)
            return run.config.prompt
        return run.capture.prompts[0].id

    def _modules(self, name: str, other: Capture) -> tuple[list[dict[str, Any]], str]:
        """The comparison module by module, or why there is none."""
        run = self._run
        if not run.config.target:
            return [], "Modules are compared on a live target only (--target)."
        if self.sides[name].is_capture and not all(s.is_capture for s in self.sides.values()):
            return [], "Its modules are not in the capture; those of the sides computed here are."
        if run.capture.foreign:
            return [], "The capture does not say how it was computed, so its modules are not known."
        from dflash_diag.localization import compare_modules

        ours, theirs = self._variants(other)
        if ours == theirs:
            why = (
                f"Both sides are {ours}: computed here, their modules would be the same run twice."
            )
            return [], why
        tokens = run.capture.tokens(run.capture.index(self._prompt)).tolist()
        try:
            with progress(run.target.n_layers, f"modules, {theirs}", unit="layer") as stage:
                rows = compare_modules(run.target, ours, theirs, tokens, tick=stage.update)
        except BadInput as error:
            return [], f"Modules cannot be compared here: {error}."
        return rows, f"Modules: {ours} against {theirs}, both computed here, on {self._prompt}."

    # --- the audit --------------------------------------------------------------------------------

    def checks(self) -> Mapping[str, Any]:
        """Rows of every check by the id of its diagnostic; a text where it was skipped."""
        key = self._key("state_checks/2")
        path = self._run.out / "state_checks" / f"{key}.json"
        if not path.is_file():
            storage.write_json(path, self._check())
        found: Mapping[str, Any] = storage.read_json(path)
        return found

    def _check(self) -> dict[str, Any]:
        from dflash_diag import state_checks
        from dflash_diag.state_checks import TARGET_CHECKS, check_sequence

        run, capture = self._run, self._run.capture
        found: dict[str, Any] = {"hidden.rows": state_checks.check_rows(capture)}
        found["hidden.argmax"] = self._or_why(
            lambda: state_checks.check_argmax(capture, self._choices)
        )
        if not run.config.target:
            why = "Only a capture is at hand, not its target (give --target)."
            return {**found, **dict.fromkeys(("hidden.identity", *TARGET_CHECKS), why)}
        target = run.target
        numbers, note = self._layer_floor(capture)
        floor = state_checks.floor_of(numbers)
        with progress(len(capture), "captured states", unit="prompt") as stage:
            found["hidden.identity"] = state_checks.check_identity(
                capture, target, floor, tick=stage.update
            )
        runner = state_checks.TargetRunner(target)
        with progress(len(TARGET_CHECKS), "target's states", unit="check") as stage:
            for name, check in TARGET_CHECKS.items():
                found[name] = self._or_why(
                    partial(lambda c: c(runner, check_sequence(capture), floor), check)
                )
                stage.update()
        return {**found, "floor_note": note}

    @staticmethod
    def _or_why(check: Callable[[], Any]) -> Any:
        from dflash_diag.state_checks import Unsupported

        try:
            return check()
        except (Unsupported, CaptureError) as error:
            return f"Not possible here: {error}."

    def _choices(self, i: int) -> tuple[Any, Any]:
        """The target's best ids and margins at the captured rows of prompt ``i``."""
        import torch

        run, capture = self._run, self._run.capture
        if not capture.foreign:
            rows = capture.positions(i)
            ids = [int(one[0]) for one in rows["top_ids"]]
            return torch.tensor(ids), torch.tensor(rows["margin"].to_numpy())
        from dflash_diag.state_checks import Unsupported

        if not run.config.target:
            raise Unsupported("the capture was made by other code and no target is at hand")
        from dflash_diag.decoding import teacher_forced

        forced = teacher_forced(run.target, capture.tokens(i).tolist())
        top = [rows.float().topk(2) for rows in forced.logits(capture.rows(i))]
        values = torch.cat([t.values for t in top]).cpu()
        return torch.cat([t.indices[:, 0] for t in top]).cpu(), values[:, 0] - values[:, 1]

    def _key(self, *content: Any) -> str:
        run = self._run
        device = [run.config.device, run.config.dtype, run.config.backend]
        return storage.content_key(run.capture_digest, run.config.target, device, *content)[:12]


def divergence_json(run: Run) -> dict[str, Any]:
    """What ``divergence --json`` writes, for the first side.

    Returns
    -------
    dict
        ``schema``, ``noise_floor`` (how it was measured, and by layer), ``first_bad`` (the first
        module above it, or the first layer where no modules were compared), ``layers`` (layers and
        modules, in execution order), ``effect`` (``target_flips``, ``draft_flips``, ``delta_tau``,
        shares and tokens a round), ``verdict``, ``checks`` (the verdicts of the audit) and
        ``notes``: what was left out, what the verdict rests on, and a server's text.
    """
    from dflash_diag import diagnostics
    from dflash_diag.diagnostics.divergence import WORDS
    from dflash_diag.divergence import first_above

    if not run.sides():
        raise BadInput(
            "nothing to compare with", "another capture, or a backend and dtype", "give --against"
        )
    name = run.sides()[0]
    found = run.divergence(name)
    rows = found["modules"] or found["layers"]
    judged, effect = run.result("hidden.divergence"), run.result("hidden.effect")
    flips = effect.estimates.get(f"target_flips {name}")
    delta = effect.estimates.get(f"delta_tau {name}")
    side = effect.params.get("sides", {}).get(name, {})
    drafts = side["flips"] / side["proposed"] if side.get("proposed") else None
    checks = [one for one in diagnostics.catalogue() if one in STATE_CHECKS]
    return {
        "schema": SCHEMA,
        "capture": run.states.own_name,
        "against": name,
        "noise_floor": {
            "how": found["floor_note"],
            "by_layer": {str(row["layer"]): row["floor"] for row in found["layers"]},
        },
        "first_bad": first_above(rows) or first_above(found["layers"]),
        "layers": [*found["layers"], *found["modules"]],
        "effect": {
            "target_flips": None if flips is None else flips.to_json(),
            "decisive_flips": side.get("n_decisive"),
            "draft_flips": drafts,
            "delta_tau": None if delta is None else delta.to_json(),
        },
        "verdict": WORDS[judged.verdict],
        "checks": {one: run.result(one).verdict.name for one in checks},
        "notes": [*dict.fromkeys([*judged.notes, *effect.notes])],
    }
