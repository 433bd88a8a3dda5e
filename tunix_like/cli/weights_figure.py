"""Draws the population weights of the estimators: the weight of a prompt as a function of its pass rate.

The figure follows the MaxRL paper (arXiv 2602.02710). matplotlib is imported only when a figure is drawn.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from tunix_like.algorithms.objective import GroupEstimator
from tunix_like.algorithms.population_weights import likelihood_weight, reinforcement_weight, weights_of
from tunix_like.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The colours are the Okabe-Ito palette, which colour-blind readers can distinguish. Curves that can overlap others are
# dashed. The orders of MaxRL have shades of one colour; the highest order is the darkest.
_STYLES: dict[str, dict[str, Any]] = {
    "ml": {"color": "#000000", "linestyle": (0, (5, 3)), "linewidth": 1.4, "zorder": 4},
    "rl": {"color": "#7f7f7f", "linewidth": 2.0},
    "grpo": {"color": "#d55e00", "linewidth": 2.0},
    "maxrl": {"linewidth": 2.2},
    "max@k": {"color": "#009e73", "linestyle": (0, (6, 1.5, 1.5, 1.5)), "linewidth": 2.0},
    "other": {"color": "#cc79a7", "linestyle": ":", "linewidth": 2.6},
}
_BLUES = ("#08306b", "#2171b5", "#6baed6", "#9ecae1")
_TICKS = (1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
_LEGEND_WIDTH = 18  # characters
_LOWEST = 0.03  # lower end of the y axis; needed because the weight of max@k falls to 0


@dataclasses.dataclass(frozen=True)
class Curve:
    """A curve of the weight of a prompt as a function of its pass rate: its label, its family (`ml`, `rl`, `grpo`,
    `maxrl`, `max@k` or `other`, which sets the line style), and the weight at each pass rate."""

    label: str
    family: str
    weights: Float[np.ndarray, "N"]


def pass_rates(group_size: int) -> Float[np.ndarray, "N"]:
    """Returns the pass rates at which the curves of the figure are computed. The rates are dense near 0 and 1. The
    lowest rate is below 1/G, where G is the group size: 1/G is the pass rate of one success in a group."""
    end = min(0.01, 0.1 / group_size)
    logits = np.linspace(np.log(end / (1 - end)), np.log(0.99 / 0.01), 400)
    return 1 / (1 + np.exp(-logits))


def drawn_estimators(
    group_size: int, k: int, truncation_order: int | None = None, ddof: int | None = None
) -> list[tuple[str, str, GroupEstimator]]:
    """Returns the label, the family (which sets the line style) and the estimator of each curve that the group size
    allows.

    MaxRL of order `G - 1`, where G is the group size, is Algorithm 1 of the MaxRL paper. A lower order
    truncates the Taylor series of the log-likelihood earlier.
    """
    label = "GRPO" if ddof is None else f"GRPO (ddof {ddof})"
    lines = [(label, "grpo", GroupEstimator("grpo", {} if ddof is None else {"ddof": ddof}))]
    for order in sorted({1, 4, group_size - 1, truncation_order or 1}, reverse=True):
        if order <= group_size - 1:
            params: dict[str, Any] = {} if order == group_size - 1 else {"truncation_order": order}
            lines.append((f"MaxRL order {order}", "maxrl", GroupEstimator("maxrl", params)))
    for name, label, highest in (("maxpo", "MaxPO", group_size - 1), ("pkpo", "PKPO", group_size)):
        if k <= highest:
            lines.append((f"{label}({k})", "max@k", GroupEstimator(name, {"k": k})))
    return lines


def curves_of(
    estimators: Sequence[tuple[str, str, GroupEstimator]], group_size: int, rates: Float[np.ndarray, "N"]
) -> list[Curve]:
    """Computes the weight of a prompt at each pass rate as curves for maximum likelihood, for plain RL and for each
    `(label, family, estimator)`. Curves that coincide are merged into one, whose label contains all names."""
    weights = weights_of([estimator for _, _, estimator in estimators], group_size, rates)
    curves = [Curve("ML, 1/p", "ml", likelihood_weight(rates)), Curve("RL", "rl", reinforcement_weight(rates))]
    for (label, family, _), values in zip(estimators, weights, strict=True):
        for index, curve in enumerate(curves):
            if np.allclose(values, curve.weights, rtol=1e-4, atol=1e-4):
                curves[index] = dataclasses.replace(curve, label=f"{curve.label} = {label}")
                break
        else:
            curves.append(Curve(label, family, values))
    return curves


def weights_figure(curves: Sequence[Curve], group_size: int, rates: Float[np.ndarray, "N"]) -> Figure:
    """Draws the weight of a prompt as a function of its pass rate. A PNG file of the figure has 1200 x 750 pixels. This
    function does not use pyplot, so it changes no global state and needs no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained", facecolor="white")
    axes = figure.subplots()
    blues = iter(_BLUES)
    for curve in curves:
        positive = np.where(curve.weights > 0, curve.weights, np.nan)  # a logarithmic axis shows positive values only
        style = _STYLES[curve.family] | ({"color": next(blues)} if curve.family == "maxrl" else {})
        axes.plot(rates, positive, label=curve.label, **style)
    _format_axes(figure, curves, group_size, rates)
    return figure


def _format_axes(figure: Figure, curves: Sequence[Curve], group_size: int, rates: Float[np.ndarray, "N"]) -> None:
    from matplotlib.ticker import NullLocator

    (axes,) = figure.axes
    highest = [float(curve.weights.max()) for curve in curves if curve.weights.max() > 0]
    axes.set_xscale("logit")  # stretches both ends: very hard and nearly solved prompts
    axes.set_yscale("log")
    axes.set_xlim(rates[0], rates[-1])
    axes.set_ylim(min(_LOWEST, 0.5 * min(highest)), 1.3 * max(highest))
    axes.set_xticks([tick for tick in _TICKS if rates[0] * (1 - 1e-9) <= tick <= rates[-1] * (1 + 1e-9)])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.tick_params(labelsize=11)
    axes.set_xlabel("pass rate p", fontsize=13)
    axes.set_ylabel("weight w(p)", fontsize=13)
    axes.set_title(f"Population weights for groups of G = {group_size}", fontsize=14, pad=10, loc="left")
    axes.text(0.02, 0.03, "E[gradient] = w(p) ∇p", transform=axes.transAxes, fontsize=12, color="#404040")
    axes.grid(which="major", color="#d9d9d9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    at_left = {line: float(np.nan_to_num(np.asarray(line.get_ydata())[0])) for line in axes.get_lines()}
    lines = sorted(at_left, key=lambda line: -at_left[line])  # the order of the legend
    labels = [str(line.get_label()).replace(" = ", " =\N{NO-BREAK SPACE}") for line in lines]
    labels = [textwrap.fill(label, _LEGEND_WIDTH) for label in labels]
    figure.legend(lines, labels, loc="outside right upper", frameon=False, fontsize=11, handlelength=2.4)


def save(figure: Figure, path: str) -> None:
    """Writes the figure in the format of the file name extension; PNG if there is no extension.

    Raises:
      UserError: the path cannot be written, or its extension is not a supported format.
    """
    kind = Path(path).suffix.removeprefix(".").lower() or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise UserError(f"--plot {path}: '.{kind}' is not a supported format; give e.g. weights.png.")
    try:
        figure.savefig(path, format=kind)
    except OSError as error:
        raise UserError(f"--plot {path}: the file cannot be written: {error.strerror or error}.") from error
