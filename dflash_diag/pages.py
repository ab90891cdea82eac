"""HTML pages in the look of the report: one style sheet, no script, no request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from dflash_diag import provenance as origins

if TYPE_CHECKING:
    from dflash_diag.stats import Estimate


class Number(NamedTuple):
    """One of the large numbers of a page."""

    label: str
    value: str
    detail: str


def number(label: str, one: Estimate, sign: str = "") -> Number:
    """An estimate of tokens a round as a large number, its interval in small print.

    Parameters
    ----------
    sign
        ``"+"`` for a difference.
    """
    if one.value is None:
        return Number(label, "unknown", "")
    value, *ends = (
        "" if number is None else f"{number:{sign}.2f}" for number in (one.value, one.lo, one.hi)
    )
    if not all(ends):
        return Number(label, value, "tokens a round")
    return Number(label, value, f"95\u00a0% interval {ends[0]} to {ends[1]}")


def render(template: str, *, provenance: Mapping[str, Any], **values: Any) -> str:
    """A page; everything that is not marked as HTML is escaped.

    Parameters
    ----------
    template
        One that extends ``shell.html.j2``.
    provenance
        Facts for the foot of the page, nested or not.
    """
    import jinja2

    folder = files("dflash_diag") / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text("utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(
        css=Markup((folder / "style.css").read_text("utf-8")),  # noqa: S704 - ours
        provenance=list(_flat(provenance)),
        version=origins.versions()["dflash-diag"] or "(from a checkout)",
        **values,
    )


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested facts as lines; what is unknown is left out."""
    for key, one in value.items():
        name = f"{prefix}{key}"
        if isinstance(one, Mapping):
            yield from _flat(one, f"{name} · ")
        elif isinstance(one, list):
            if one:
                yield name, ", ".join(map(str, one))
        elif one not in (None, ""):
            yield name, str(one)
