"""A sentence that a lab's cell shows."""

from __future__ import annotations

from markupsafe import Markup


class _Shown(Markup):
    """HTML in a notebook, the words alone elsewhere."""

    def _repr_html_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return self.striptags()


def note(text: str) -> Markup:
    """Return a sentence as a cell shows it."""
    return _Shown("<div role='status' style='border-left:4px solid #4D4D4D;padding:4px 10px'>{}</div>").format(text)
