"""Estimators of scikit-learn: a classifier, a regressor, and a transformer by an expansion."""

from kapsi.estimators.predictors import RPNClassifier, RPNRegressor
from kapsi.estimators.transformer import ExpansionTransformer

__all__ = ["ExpansionTransformer", "RPNClassifier", "RPNRegressor"]
