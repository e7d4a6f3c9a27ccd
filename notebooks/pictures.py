"""The style of the notebooks' pictures: small, on white, axes on two sides only."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt


def picture(height: float = 2.5, *, panels: int = 1, sharey: bool = False, **labels: Any) -> Any:
    """The axes of a new picture, or of its panels side by side; `labels` as `Axes.set` takes them.

    Jupyter shows the picture when the cell ends.
    """
    figure, axes = plt.subplots(
        1, panels, figsize=(5.6, height), facecolor="white", layout="constrained", sharey=sharey
    )
    for each in figure.axes:
        each.spines[["top", "right"]].set_visible(False)
        each.set(**labels)
    return axes
