"""The catalogue as a list: every function says what it is, its formula, options and source, and is found by its names."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

import kapsi as kp
from kapsi import listing
from kapsi.function import ALIASES, ROLES, Function, options_of
from kapsi.spec import parse_yaml

CLASSES = [cls for cls in kp.catalogue() if cls.__module__.startswith("kapsi.")]
EACH = pytest.mark.parametrize("cls", CLASSES, ids=[f"{cls.role}-{cls.name}" for cls in CLASSES])
FORMULAS = [cls for cls in CLASSES if cls.role in ("expansion", "reconciliation", "remainder")]
EACH_FORMULA = pytest.mark.parametrize("cls", FORMULAS, ids=[f"{cls.role}-{cls.name}" for cls in FORMULAS])


# ------------------------------------------------------------------------------------------------ every function


@EACH
def test_every_function_says_what_it_is_and_what_its_options_are(cls) -> None:
    entry = listing.entry_of(cls)
    assert entry.summary
    assert len(entry.summary) <= 130
    assert [option.name for option in entry.options] == [field.name for field in options_of(cls)]
    for option in entry.options:
        assert len(option.meaning) > 2, f"Args does not say what {option.name!r} is"
        assert option.kind
        assert "<" not in option.kind, "a class is written by its name"


@EACH_FORMULA
def test_every_function_has_a_formula_and_a_source(cls) -> None:
    entry = listing.entry_of(cls)
    assert entry.formula, "the docstring has no formula: …: κ(x) = …, D = …"
    assert " = " in entry.formula
    assert entry.source, "the docstring has no Source:"
    assert entry.citation


@EACH_FORMULA
def test_every_function_says_its_size(cls) -> None:
    entry = listing.entry_of(cls)
    if cls.role != "remainder":
        assert entry.size or entry.example_size, f"the docstring does not say {entry.letter} = …"
        assert entry.sizes.startswith(f"{entry.letter} = ")
    number = re.fullmatch(r"\d+", entry.size or "")
    if number and entry.example_size is not None:
        assert int(number[0]) == entry.example_size
    # The simplest formulas are checked: m inputs, G functions of each.
    if entry.size == "m·d":
        assert entry.example_size == 4 * entry.function.degree
    if entry.size == "r(n + D)":
        assert entry.example_size == entry.function.rank * (6 + 12)


@EACH
def test_every_example_is_a_specification_with_the_function(cls) -> None:
    entry = listing.entry_of(cls)
    if cls.role not in listing.TITLES:
        assert kp.from_dict(parse_yaml(entry.example, "example"), cls) == entry.function
        return
    spec = kp.from_dict(parse_yaml(entry.example, "example"))
    layer = spec.layers[0]
    head = layer.heads[0]
    places = {"fusion": layer.fusion, "process": head.before[0] if head.before else None}
    found = places[cls.role] if cls.role in places else getattr(head, cls.role)
    assert found == entry.function


@EACH
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_of_an_entry_is_too_long(cls, width) -> None:
    entry = listing.entry_of(cls)
    body = re.split("\nin a specification\n|\nas plain data\n", entry.text(width))[0].splitlines()
    longest = max(len(word) for line in body for word in line.split())
    # Three columns before the last one leave it 24 letters at least.
    assert max(map(len, body)) <= max(width, 80, longest + 52)
    assert max(map(len, entry.line(width).splitlines())) <= max(width, longest + 28)


# ------------------------------------------------------------------------------------------------ one function


def test_an_entry_is_what_class_and_docstring_say() -> None:
    entry = kp.functions("expansion")["b_spline"]
    assert (entry.role, entry.name, entry.cls, entry.aliases) == ("expansion", "b_spline", kp.BSpline, ("bspline",))
    assert entry.summary == "B-splines of each input"
    assert entry.formula.startswith("κ(x) = [B₁(x), …, B_G(x)]")
    assert (entry.size, entry.example_size, entry.domain) == ("m·G", 4 * (5 + 3), "[-1, 1]")
    assert entry.tensors[0].startswith("range")
    assert entry.source.startswith('arXiv 2407.04819, "B-Splines based Data Expansion"; de Boor, A Practical')
    assert entry.citation.startswith("arXiv 2407.04819")
    options = {option.name: option for option in entry.options}
    degree, policy = options["degree"], options["extrapolation"]
    assert (degree.kind, degree.default, degree.minimum, degree.maximum) == ("integer", "3", 0, 16)
    assert policy.choices == ("linear", "extended", "clamp", "zero", "error")
    assert policy.range == "linear | extended | clamp | zero | error"
    assert options["low"].range == "-1e+30..1e+30"
    assert options["low"].meaning == options["high"].meaning
    assert options["low"].meaning.startswith("range before calibration, in units of the inputs")


def test_options_change_what_an_entry_shows() -> None:
    entry = listing.entry_of(kp.BSpline, intervals=8, degree=2, low=0.0, high=3.0)
    assert (entry.example_size, entry.domain) == (40, "[0, 3]")
    assert "intervals: 8, degree: 2" in entry.example
    with pytest.raises(kp.SpecError, match=r"b_spline: BSpline has no option 'interval'; did you mean 'intervals'\?"):
        listing.entry_of(kp.BSpline, interval=8)


def test_what_must_be_given_is_that_of_the_first_example() -> None:
    entry = kp.functions("expansion")["nested"]
    assert entry.options[0].default is None
    assert re.search(r"parts +\(required\) +list of expansion", entry.text())
    assert entry.function == kp.Nested(("chebyshev", "taylor"))


def test_options_of_a_family_are_documented_by_its_base() -> None:
    class Family(kp.Expansion):
        """A family: κ(x) = [x], D = m.

        Args:
            degree: of the family.

        Source: Book (1999), chapter 1.
        """

    @dataclass(frozen=True)
    class Member(Family, name="member_of_a_family"):
        """A member, with something of its own.

        Args:
            more: what it has more,
                on two lines.
        """

        degree: int = kp.option(3, minimum=1)
        more: tuple[float, ...] | None = None

        def factors(self, in_features):
            return 1, in_features

        def __call__(self, x, params):
            return kp.features.DenseFeatures(x)

    try:
        entry = listing.entry_of(Member)
        assert entry.summary == "A member, with something of its own"
        assert (entry.formula, entry.size, entry.citation) == ("κ(x) = [x], D = m", "m", "Book (1999)")
        assert [o.meaning for o in entry.options] == ["of the family.", "what it has more, on two lines."]
        assert [o.kind for o in entry.options] == ["integer", "list of number or null"]
        assert [o.range for o in entry.options] == ["1..", "list of number or null"]
    finally:
        del ROLES["expansion"]["member_of_a_family"]


def test_a_role_outside_of_layers_is_listed_by_options_and_plain_data() -> None:
    class Kiln(Function, role="glass"):
        """Base of a role."""

    @dataclass(frozen=True)
    class Oven(Kiln, name="oven"):
        """An oven: T = 20 + r·t.

        Args:
            rate: r, degrees per minute.
        """

        rate: float = kp.option(2.0, minimum=0.1)

    try:
        entry = kp.functions("glass")["oven"]
        assert (entry.summary, entry.formula) == ("An oven", "T = 20 + r·t")
        assert (entry.sizes, entry.tensors, entry.domain, entry.source) == ("", (), None, None)
        assert entry.text().endswith("\n\nas plain data\n  {kind: oven, rate: 2.0}")
        text = str(kp.functions())
        assert re.search(r"^glasses\n  oven  +An oven\n  +rate=2.0 \[0\.1\.\.\]$", text, re.MULTILINE)
        assert not kp.plots.drawable(entry.function)
        with pytest.raises(kp.SpecError, match="functions of role glass have no pictures, got oven"):
            kp.plots.picture(entry.function)
    finally:
        del ROLES["glass"], ALIASES["glass"]


# ------------------------------------------------------------------------------------------------ the list


def test_the_list_is_the_registry() -> None:
    found = kp.functions()
    assert [entry.cls for entry in found if entry.cls in CLASSES] == sorted(
        CLASSES, key=lambda cls: (listing.roles().index(cls.role), cls.name)
    )
    assert set(listing.roles()) == set(ROLES)
    for role in ROLES:
        part = kp.functions(role)
        assert [entry.name for entry in part] == sorted(ROLES[role])
        assert str(part) in str(found) or len(part) < len(found)
        for alias, name in ALIASES[role].items():
            assert part[alias].name == name
    assert found[0] == kp.functions("expansion")[0]
    assert [entry.name for entry in found[:2]] == [found[0].name, found[1].name]


def test_the_list_shows_itself(capsys) -> None:
    found = kp.functions()
    text = repr(found)
    assert text == str(found)
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(
        r"^  taylor +All monomials of degree 1 to d\n +degree=2 \[1\.\.64\], symmetric=false\n", text, re.M
    )
    assert re.search(r"^ +D = Σ mᵏ; 20 for m = 4; arXiv 2407\.04819$", text, re.MULTILINE)
    for entry in found:
        assert re.search(rf"^  {entry.name}\b", text, re.MULTILINE)
    assert repr(found["taylor"]) == found["taylor"].text()
    assert capsys.readouterr() == ("", "")


def test_the_list_of_a_notebook_is_escaped() -> None:
    page = kp.functions()._repr_html_()
    assert page.count("<tr>") == len(kp.functions()) + 1
    assert "x for x &gt; 0" in page
    assert not set(re.findall(r"<(\w+)", page)) - {"table", "tr", "th", "td"}
    one = kp.functions()["elu"]._repr_html_()
    assert one.startswith("<pre>")
    assert "x for x &gt; 0" in one


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: kp.functions("expansions"), r"no role 'expansions'; did you mean 'expansion'\? choose from expansion"),
        (lambda: kp.functions(3), "there is no role 3; choose from"),
        (lambda: kp.functions()["tailor"], r"no function is called 'tailor'; did you mean 'taylor'"),
        (lambda: kp.functions("remainder")["taylor"], "no function is called 'taylor'; .*identity, linear"),
        (
            lambda: kp.functions()["identity"],
            r"functions\('expansion'\)\['identity'\] and .*\('remainder'\)\['identity'\]",
        ),
    ],
)
def test_wrong_names_say_what_there_is(ask, message) -> None:
    with pytest.raises(kp.SpecError, match=message) as caught:
        ask()
    assert "\n" not in str(caught.value)
