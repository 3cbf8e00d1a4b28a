"""The names of the paper and of tinyBIG: the table of the documentation is complete and true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import distributions

import kapsi as kp
from kapsi.function import ROLES, lookup, registered_name
from kapsi.spec import parse_yaml

PAGE = Path(__file__).parents[1] / "docs" / "names.md"

# All classes of tinyBIG 0.2.1 with a role of kapsi, and the names of its instances where they differ.
TINYBIG = {
    "expansion": """identity reciprocal linear nested extended taylor fourier bspline chebyshev chebyshev_polynomial jacobi
        jacobi_polynomial hermite laguerre laguerre_polynomial legendre legendre_polynomial gegenbauer gegenbauer_polynomial
        bessel bessel_polynomial reverse_bessel reverse_bessel_polynomial fibonacci fibonacci_polynomial lucas
        lucas_polynomial hyperbolic arc_hyperbolic trigonometric arc_trigonometric gaussian_rbf inverse_quadratic_rbf
        harr_wavelet beta_wavelet shannon_wavelet ricker_wavelet dog_wavelet meyer_wavelet combinatorial
        combinatorial_normal naive_normal normal naive_cauchy cauchy naive_chi2 chi2 naive_gamma gamma naive_laplace laplace
        naive_exponential exponential hybrid_probabilistic geometric cuboid_patch_based_geometric
        cylinder_patch_based_geometric sphere_patch_based_geometric""",
    "reconciliation": """constant constant_c zero one constant_eye identity masking duplicated_padding
        duplicated_diagonal_padding lorr low_rank hm hypercomplex_multiplication lphm dual_lphm hypernet
        random_matrix_adaption random_matrix_hypernet""",
    "remainder": "constant zero one identity linear",
    "fusion": """concatenation weighted_summation summation average parameterized_weighted_summation metric max min sum mean
        prod median l1_norm l2_norm parameterized_concatenation lowrank_parameterized_concatenation
        hm_parameterized_concatenation lphm_parameterized_concatenation dual_lphm_parameterized_concatenation
        random_matrix_adaption_parameterized_concatenation""",
    "metric": "accuracy f1 mse mean_squared_error",
}
# The paper's words for functions, where tinyBIG has none of the same.
PAPER = {
    "expansion": """fourier_series inverse_hyperbolic inverse_trigonometric haar_wavelet hybrid
        normal_combinatorial combinatorial_probabilistic hermite_polynomial""",
    "reconciliation": "",
    "remainder": "complementary_expansion",
    "fusion": "",
    "metric": "",
}


def table() -> list[tuple[str, str, str]]:
    """Return (role, name, kapsi) for every name of the page."""
    rows, role = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            role = line[3:].strip()
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if role in TINYBIG and len(cells) == 3 and cells[0].startswith("`"):
            rows += [(role, name, cells[1].strip("`")) for name in re.findall("`([^`]+)`", cells[0])]
    return rows


ROWS = table()
BASES = {"expansion": kp.Expansion, "reconciliation": kp.Reconciliation}


@pytest.mark.parametrize("role", TINYBIG)
def test_the_page_has_every_name(role) -> None:
    listed = {name.removesuffix(f"_{role}") for r, name, _ in ROWS if r == role}
    assert set((TINYBIG[role] + " " + PAPER[role]).split()) == listed


@pytest.mark.parametrize(("role", "name", "target"), ROWS, ids=[f"{role}-{name}" for role, name, _ in ROWS])
def test_a_name_is_the_function_of_the_page_or_unknown(role, name, target) -> None:
    if target == "different":
        assert registered_name(role, name) is not None  # a name of kapsi's own with another meaning
    elif target == "none":
        with pytest.raises(kp.SpecError, match="choose from"):
            lookup(role, name)
    else:
        plain = re.fullmatch(r"\w+", target)
        expected = ROLES[role][target] if plain else type(kp.from_dict(parse_yaml(target, name), BASES[role]))
        assert lookup(role, name) is expected


def test_a_suffix_is_the_role_and_no_other() -> None:
    assert kp.functions("expansion")["taylor_expansion"].name == "taylor"
    with pytest.raises(kp.SpecError, match="no reconciliation is called 'lorr_expansion'; choose"):
        kp.from_dict("lorr_expansion", kp.Reconciliation)


# Densities with tinyBIG's settings, setting-major.
SETTINGS = {
    "normal_expansion": [distributions.Normal(mean, std) for std in (1.0, 0.1) for mean in (0.0, 1.0, -1.0)],
    "cauchy_expansion": [distributions.Cauchy(loc, scale) for loc in (0.0, 1.0, -1.0) for scale in (1.0, 0.5)],
    "laplace_expansion": [distributions.Laplace(loc, scale) for loc in (0.0, 1.0, -1.0) for scale in (1.0, 2.0)],
    "chi2_expansion": [distributions.Chi2(df) for df in (1.0, 2.0)],
    "gamma_expansion": [distributions.Gamma(shape, rate) for shape in (0.5, 1.0, 2.0) for rate in (1.0, 2.0)],
    "exponential_expansion": [distributions.Exponential(rate) for rate in (0.5, 0.75, 1.0, 2.0, 3.0, 5.0)],
    "naive_normal_expansion": [distributions.Normal(0.0, 1.0)],
    "naive_cauchy_expansion": [distributions.Cauchy(0.0, 1.0)],
    "naive_laplace_expansion": [distributions.Laplace(0.0, 1.0)],
    "naive_chi2_expansion": [distributions.Chi2(1.0)],
    "naive_gamma_expansion": [distributions.Gamma(0.5, 1.0)],
    "naive_exponential_expansion": [distributions.Exponential(0.5)],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_options_of_the_page_are_the_settings_of_tinybig(name) -> None:
    target = next(target for _, other, target in ROWS if other == name)
    kappa = kp.from_dict(parse_yaml(target, name), kp.Expansion)
    x = torch.tensor([[0.3, 2.0]], dtype=torch.float64)
    columns = kp.Head(2, 1, kp.HeadSpec(kappa), dtype=torch.float64).expand(x).dense()
    expected = torch.cat([density.log_prob(x).double() for density in SETTINGS[name]], -1)
    torch.testing.assert_close(columns, expected, rtol=1e-6, atol=1e-6)
