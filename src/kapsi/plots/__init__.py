"""Pictures: functions of the catalogue, and effects, errors and training of models.

matplotlib is imported on demand; install with `pip install 'kapsi[plot]'`. No function opens a window.
"""

from kapsi.plots.catalogue import STYLE, Curves, Maps, drawable, function, picture, save
from kapsi.plots.heads import edge, expansion_images, weight_images
from kapsi.plots.models import (
    calibration,
    confusion_matrix,
    effect,
    importances,
    learning_curves,
    network,
    pair_effect,
    precision_recall,
    residuals,
    roc,
)

__all__ = [
    "STYLE",
    "Curves",
    "Maps",
    "calibration",
    "confusion_matrix",
    "drawable",
    "edge",
    "effect",
    "expansion_images",
    "function",
    "importances",
    "learning_curves",
    "network",
    "pair_effect",
    "picture",
    "precision_recall",
    "residuals",
    "roc",
    "save",
    "weight_images",
]
