"""Expanded inputs κ(x) as small immutable structures."""

from kapsi.features.base import (
    LARGEST_FORMED,
    ConcatenatedFeatures,
    DenseFeatures,
    Features,
    NormalizedFeatures,
    add,
    apply_matrix,
    check_formed,
    formed,
    widen,
)
from kapsi.features.pairs import PairFeatures, with_pairs
from kapsi.features.products import OuterFeatures, ProductFeatures
from kapsi.features.recomputed import BLOCK, RecomputedFeatures, RecomputedProduct, product_jvp
from kapsi.features.sparse import (
    LARGEST_ENTRIES,
    SparseFeatures,
    SparseProductFeatures,
    entries_of,
    entry_pairs,
    features_of,
    side_by_side,
)

__all__ = [
    "BLOCK",
    "LARGEST_ENTRIES",
    "LARGEST_FORMED",
    "ConcatenatedFeatures",
    "DenseFeatures",
    "Features",
    "NormalizedFeatures",
    "OuterFeatures",
    "PairFeatures",
    "ProductFeatures",
    "RecomputedFeatures",
    "RecomputedProduct",
    "SparseFeatures",
    "SparseProductFeatures",
    "add",
    "apply_matrix",
    "check_formed",
    "entries_of",
    "entry_pairs",
    "features_of",
    "formed",
    "product_jvp",
    "side_by_side",
    "widen",
    "with_pairs",
]
