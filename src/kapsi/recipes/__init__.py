"""Recipes: each maps rows of numbers to a fitted model of one layer; `auto` chooses and weights heads.

One file a head, each with its closed form or its solver. Heads are compared on the same held-out rows.
"""

from kapsi.recipes.additive import AdditiveHead, StepsHead
from kapsi.recipes.auto import Auto
from kapsi.recipes.base import (
    CrossFit,
    Fold,
    HeadRecipe,
    LeaderboardRow,
    Recipe,
    RecipeData,
    RecipePlan,
    RecipeResult,
    Watch,
)
from kapsi.recipes.boosted import BoostedPairsHead, BoostedTreesHead
from kapsi.recipes.conformal import Conformal, Quantiles
from kapsi.recipes.constant import ConstantHead
from kapsi.recipes.forest import ForestHead
from kapsi.recipes.function_search import FunctionCandidate, FunctionSearch, SuccessiveHalving
from kapsi.recipes.functions import FunctionsHead
from kapsi.recipes.image_linear import ImageLinearHead
from kapsi.recipes.image_patches import ImagePatchesHead
from kapsi.recipes.image_products import ImageProductsHead
from kapsi.recipes.kernel import KernelHead
from kapsi.recipes.linear import LinearHead
from kapsi.recipes.mixture import mixture
from kapsi.recipes.model_search import ModelCandidate, ModelSearch, SelectionRule
from kapsi.recipes.network import NetworkHead
from kapsi.recipes.pairs import PairsHead
from kapsi.recipes.quadratic import QuadraticHead
from kapsi.recipes.sparse_linear import SparseLinearHead
from kapsi.recipes.text_linear import TextLinearHead, TextNaiveBayesHead
from kapsi.recipes.text_products import TextProductsHead

__all__ = [
    "AdditiveHead",
    "Auto",
    "BoostedPairsHead",
    "BoostedTreesHead",
    "Conformal",
    "ConstantHead",
    "CrossFit",
    "Fold",
    "ForestHead",
    "FunctionCandidate",
    "FunctionSearch",
    "FunctionsHead",
    "HeadRecipe",
    "ImageLinearHead",
    "ImagePatchesHead",
    "ImageProductsHead",
    "KernelHead",
    "LeaderboardRow",
    "LinearHead",
    "ModelCandidate",
    "ModelSearch",
    "NetworkHead",
    "PairsHead",
    "QuadraticHead",
    "Quantiles",
    "Recipe",
    "RecipeData",
    "RecipePlan",
    "RecipeResult",
    "SelectionRule",
    "SparseLinearHead",
    "StepsHead",
    "SuccessiveHalving",
    "TextLinearHead",
    "TextNaiveBayesHead",
    "TextProductsHead",
    "Watch",
    "mixture",
]
