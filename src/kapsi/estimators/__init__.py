"""Estimators of scikit-learn: a classifier, a regressor, and a transformer by an expansion."""

from kapsi.estimators.predictors import RPNClassifier, RPNRegressor

__all__ = ["RPNClassifier", "RPNRegressor"]
