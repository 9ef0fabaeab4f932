"""Every public name says in its docstring what it does, takes, returns and raises, with an example that runs."""

from __future__ import annotations

import builtins
import doctest
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pytest
from test_readme import run_examples
from torch import nn

import insum_ops
import insum_ops.distributed
import insum_ops.equivariant
import insum_ops.formats
import insum_ops.nn
from insum_ops.compiler.language import errors

pytestmark = pytest.mark.cpu

PACKAGES = (insum_ops, insum_ops.distributed, insum_ops.equivariant, insum_ops.formats, insum_ops.nn)
SECTIONS = ("Args", "Returns", "Yields", "Raises", "Example")
# What a format offers the compiler and nobody else: compiler/binding/sparse_protocol.py says what each is. The first
# two are for layers, which keep a format of their own.
FOR_THE_COMPILER = {
    *("as_private", "as_shared"),
    *("facts", "flat_values", "has_row_order", "in_groups", "memory", "pattern_cache", "regrouped_view"),
    *("row_ordered_view", "sets", "unguarded", "value_source"),
}
EXCEPTIONS = {**vars(builtins), **vars(errors), "FormatError": insum_ops.formats.FormatError}


class Documented:
    """A public class, function, method or property with the parts of its docstring."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.is_property = isinstance(value, property)
        self.value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        self.is_class = inspect.isclass(value)
        self.text = inspect.getdoc(self.value) or ""

    @cached_property
    def signature(self) -> inspect.Signature | None:
        """None for an exception, whose constructor Python does not describe."""
        if self.is_class and issubclass(self.value, Exception):
            return None
        return inspect.signature(self.value)

    @property
    def has_torch_constructor(self) -> bool:
        """Its arguments are torch's, and differ from one version of torch to the next."""
        return self.is_class and getattr(self.value.__init__, "__module__", "").startswith("torch.")

    @property
    def arguments(self) -> dict[str, inspect.Parameter]:
        """By the names that a caller sees, with the stars of those that take any number."""
        if self.signature is None or self.is_property:
            return {}
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        parameters = [own for own in self.signature.parameters.values() if own.name not in ("self", "cls")]
        return {stars.get(own.kind, "") + own.name: own for own in parameters}

    @cached_property
    def sections(self) -> dict[str, str]:
        """The lines under each heading, and under "" what is before the first."""
        parts = re.split(rf"^({'|'.join(SECTIONS)}):$", self.text, flags=re.MULTILINE)
        return {"": parts[0], **dict(zip(parts[1::2], parts[2::2]))}

    def items(self, section: str) -> dict[str, str]:
        """`name: description` of each item of a section; several names may share a description."""
        found = {}
        for item in re.split(r"\n {4}(?! )", self.sections.get(section, "")):
            names, colon, description = item.strip().partition(": ")
            if colon:
                found.update({name: " ".join(description.split()) for name in names.split(", ")})
        return found


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that this project defines, those of its bases included."""
    for base in kind.__mro__:
        if not base.__module__.startswith("insum_ops"):
            continue
        for name, value in vars(base).items():
            is_member = inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod))
            is_of_torch = issubclass(kind, nn.Module) and name != "forward" and hasattr(nn.Module, name)
            if is_member and not name.startswith("_") and not is_of_torch and name not in FOR_THE_COMPILER:
                yield f"{base.__module__}.{base.__qualname__}.{name}", value


def public() -> list[Documented]:
    found: dict[str, Any] = {}
    for package in PACKAGES:
        for name in package.__all__:
            value = getattr(package, name)
            found[f"{package.__name__}.{name}"] = value
            if inspect.isclass(value):
                found.update(members(value))
    return [Documented(name, value) for name, value in found.items()]


PUBLIC = public()
CALLABLE = [own for own in PUBLIC if not own.is_property]


def test_public_names_are_found():
    names = {own.name for own in PUBLIC}
    assert {"insum_ops.insum", "insum_ops.nn.SubMConv3d", "insum_ops.formats.kernel_map"} <= names
    assert "insum_ops.formats.from_tensors.FromTensors.from_dense" in names
    assert "insum_ops.conv.convolution.SparseConvolution.forward" in names


def test_the_first_line_is_one_sentence():
    lines = {own.name: own.text.split("\n") for own in PUBLIC}
    assert [name for name, own in lines.items() if not re.fullmatch(r"\S.*\.", own[0]) or ". " in own[0]] == []
    assert [name for name, own in lines.items() if own[1:2] not in ([], [""])] == []


def test_every_argument_is_described_by_its_name():
    wrong = {}
    for own in CALLABLE:
        described, taken = own.items("Args"), own.arguments
        required = [] if own.has_torch_constructor else [name for name in taken if not name.startswith("_")]
        missing = [name for name in required if not described.get(name)]
        unknown = [name for name in described if name not in taken]
        if missing or unknown:
            wrong[own.name] = missing, unknown
    assert wrong == {}


def test_arguments_are_described_in_the_order_of_the_signature():
    for own in CALLABLE:
        described = own.items("Args")
        assert [*described] == [name for name in own.arguments if name in described], own.name


def test_tensors_are_described_with_their_shapes():
    wrong = []
    for own in CALLABLE:
        for name, description in own.items("Args").items():
            is_tensor = str(own.arguments[name].annotation).startswith("Tensor")
            if is_tensor and "[" not in description and "not used" not in description:
                wrong.append((own.name, name))
    assert wrong == []


def test_what_returns_something_says_what():
    def returns(own: Documented) -> bool:
        return not own.is_class and own.signature.return_annotation not in (None, "None")

    says = {own.name: bool({"Returns", "Yields"} & own.sections.keys()) for own in CALLABLE}
    assert [own.name for own in CALLABLE if returns(own) != says[own.name]] == []


def test_errors_are_named_by_their_classes():
    wrong = []
    for own in PUBLIC:
        for name, description in own.items("Raises").items():
            kind = EXCEPTIONS.get(name)
            if not description or not (inspect.isclass(kind) and issubclass(kind, Exception)):
                wrong.append((own.name, name))
    assert wrong == []


def test_every_class_function_and_method_has_an_example():
    assert [own.name for own in CALLABLE if ">>> " not in own.sections.get("Example", "")] == []


@pytest.mark.parametrize("own", [own for own in PUBLIC if ">>>" in own.text], ids=lambda own: own.name)
def test_an_example_runs_by_itself(own):
    """With no names but those that it imports, as whoever pastes it has it."""
    run_examples(doctest.DocTestParser().get_doctest(own.text, {}, own.name, None, 0))


@pytest.mark.parametrize(
    "family",
    ["SparseAvgPool", "SparseConv", "SparseConvTranspose", "SparseInverseConv", "SparseMaxPool", "SubMConv"],
)
def test_layers_of_one_family_describe_arguments_and_errors_alike(family):
    layers = [Documented(family, getattr(insum_ops.nn, f"{family}{ndim}d")) for ndim in (1, 2, 3, 4)]
    for section in ("Args", "Raises"):
        texts = {re.sub(r"\dd\b", "Nd", " ".join(layer.sections[section].split())) for layer in layers}
        assert len(texts) == 1
