"""Every format by name."""

from __future__ import annotations

from difflib import get_close_matches

from moestro.errors import invalid_input
from moestro.formats import fp4, fp8, int4, int8, mxfp4, nvfp4
from moestro.formats.base import WeightFormat
from moestro.formats.codec import Codec
from moestro.formats.dense import DENSE_FORMATS

_FAMILIES = (fp8, int8, int4, mxfp4, nvfp4, fp4)

CODECS: dict[WeightFormat, Codec] = {form: codec for family in _FAMILIES for form, codec in family.CODECS.items()}
FORMATS: dict[str, WeightFormat] = {form.name: form for form in (*DENSE_FORMATS, *CODECS)}


def is_registered(form: WeightFormat) -> bool:
    """Whether a format, or a copy of one, is what `FORMATS` has under its name. A tracer follows this, and no `==`."""
    known = FORMATS.get(form.name)
    if known is None or known is form:
        return known is form
    if known.element != form.element or known.storage != form.storage or known.per_item != form.per_item:
        return False
    s, t = known.scaling, form.scaling
    if s is None or t is None:
        return s is t
    sizes = s.rows == t.rows and s.columns == t.columns
    return sizes and s.zeros == t.zeros and s.global_scales == t.global_scales


_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def find_format(name: str) -> WeightFormat:
    """The format of that name, or of the alias bf16, fp16, fp32 or fp64.

    Raises:
        InvalidInputError: there is none.
    """
    found = FORMATS.get(_ALIASES.get(name, name)) if isinstance(name, str) else None
    if found is None:
        raise invalid_input(
            "find_format",
            got=f"format {name!r}",
            needs=f"one of {', '.join(FORMATS)}",
            fix=_nearest(name),
        )
    return found


def _nearest(name: str) -> str:
    """A name that was perhaps meant: one that goes on from there, else one that looks alike."""
    meant = [known for known in FORMATS if known.startswith(f"{name}-")] or get_close_matches(name.lower(), FORMATS)
    return f"Perhaps {' or '.join(meant)}." if meant else "Pick one of these."
