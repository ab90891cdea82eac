"""What an audit says: one property of the step a row, with what was found and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dflash_diag.causes import CAUSES
from dflash_diag.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "dflash_diag.audit/1"
Status = Literal["found", "excluded", "measured", "not_identifiable", "not_tested"]
"""``found``: something is wrong. ``excluded``: it was looked for, and all is as expected.
``measured``: a fact without a right or wrong. The others say that there is no answer, and why."""


@dataclass(frozen=True, kw_only=True)
class Property:
    """One thing that was asked of a training step."""

    id: str
    """A cause of the catalogue, or ``step.*``, ``loss.*``, ``labels.*``, ``head.*``, ``metric.*``
    for what has no entry there."""
    status: Status
    found: Any = None
    """A number, a list of numbers or a short text; None where nothing is known."""
    expected: Any = None
    evidence: str = ""
    remedy: str = ""


def fault(id: str, found: Any, expected: Any, evidence: str, remedy: str = "") -> Property:  # noqa: A002
    """Something that is wrong; the catalogue's remedy unless another is given."""
    if not remedy and id in CAUSES:
        remedy = CAUSES[id].remedy
    return Property(
        id=id, status="found", found=found, expected=expected, evidence=evidence, remedy=remedy
    )


def fine(id: str, found: Any, expected: Any, evidence: str = "") -> Property:  # noqa: A002
    """Something that was looked for and is as it should be."""
    return Property(id=id, status="excluded", found=found, expected=expected, evidence=evidence)


def fact(id: str, found: Any, evidence: str = "", expected: Any = None) -> Property:  # noqa: A002
    """A measured fact."""
    return Property(id=id, status="measured", found=found, expected=expected, evidence=evidence)


def unknown(id: str, why: str, *, expected: Any = None) -> Property:  # noqa: A002
    """Something that this step cannot tell."""
    return Property(id=id, status="not_identifiable", expected=expected, evidence=why)


def untested(id: str, why: str, *, expected: Any = None) -> Property:  # noqa: A002
    """Something that could not be tried."""
    return Property(id=id, status="not_tested", expected=expected, evidence=why)


@dataclass(frozen=True, eq=False)
class Audit:
    """Everything that was found out about one training step."""

    properties: list[Property]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the plots show: the weight of each slot, the influence of rows, blocks and layers."""
    notes: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Property]:
        return iter(self.properties)

    def __getitem__(self, id: str) -> Property:  # noqa: A002 - it is the id
        for one in self.properties:
            if one.id == id:
                return one
        raise KeyError(id)

    @property
    def faults(self) -> list[Property]:
        """What is wrong with the step itself, first things first."""
        return [one for one in self if one.status == "found" and not one.id.startswith("metric.")]

    @property
    def misreported(self) -> list[Property]:
        """Metrics that are not what they claim."""
        return [one for one in self if one.status == "found" and one.id.startswith("metric.")]

    def to_json(self) -> dict[str, Any]:
        """What the verb ``audit`` writes."""
        return {"schema": SCHEMA, "properties": [asdict(one) for one in self]}

    def kept(self) -> dict[str, Any]:
        """`to_json` with all that a stored audit needs to be drawn."""
        return {**self.to_json(), "facts": dict(self.facts), "notes": self.notes}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Audit:
        """What `kept` gave.

        Raises
        ------
        BadInput
            Of another schema.
        """
        if kept.get("schema") != SCHEMA:
            raise BadInput(f"an audit of schema {kept.get('schema')!r}", repr(SCHEMA))
        rows = [Property(**one) for one in kept["properties"]]
        return cls(rows, kept.get("facts", {}), list(kept.get("notes", [])))

    @property
    def frame(self) -> pd.DataFrame:
        """One row a property, everything as text."""
        import pandas as pd

        rows = [
            {
                "property": one.id,
                "status": one.status.replace("_", " "),
                "found": words(one.found),
                "expected": words(one.expected),
                "evidence": one.evidence,
                "remedy": one.remedy,
            }
            for one in self
        ]
        return pd.DataFrame(rows, columns=list(rows[0]) if rows else ["property"])


def words(value: Any) -> str:
    """A found value as text; empty where there is none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(map(words, value))
    return str(value)
