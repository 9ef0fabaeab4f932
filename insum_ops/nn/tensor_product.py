"""e3nn's tensor products, with its names, weights and normalisations, as statements."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..compiler.errors import OperandError, ShapeError
from ..equivariant.clebsch_gordan import Irreps, read_irreps
from ..equivariant.paths import Instruction, Variances, fully_connected, normalised
from ..equivariant.product import make_product
from ..formats import GroupCOO

__all__ = ["FullyConnectedTensorProduct", "TensorProduct"]

# what else e3nn's state_dict may hold: coefficients that we compute
FOREIGN_KEYS = ("_compiled_main_", "_tensor_constant")


class TensorProduct(nn.Module):
    """`Z[b,w,k] += C[i,j,k] * W[u,v,w] * X[b,u,i] * Y[b,v,j]`, added up over paths.

    Takes what `e3nn.o3.TensorProduct` takes, in its order and with its defaults, and has its attributes and weights:
    `instructions` are `(i_in1, i_in2, i_out, mode, has_weight[, path_weight])`, modes uvw, uvu, uvv, uuw, uuu and
    uvuv. `layout` is e3nn's "mul_ir", each block [multiplicity, 2l+1], or "ir_mul", its transpose, which is read and
    written without a copy where multiplicities are equal. e3nn's options of code generation are accepted and ignored.
    """

    weight: Tensor
    output_mask: Tensor

    def __init__(
        self,
        irreps_in1: Irreps,
        irreps_in2: Irreps,
        irreps_out: Irreps,
        instructions: Sequence[Sequence[object]],
        in1_var: Variances = None,
        in2_var: Variances = None,
        out_var: Variances = None,
        irrep_normalization: str | None = None,
        path_normalization: str | None = None,
        internal_weights: bool | None = None,
        shared_weights: bool | None = None,
        compile_left_right: bool = True,
        compile_right: bool = False,
        normalization: str | None = None,
        _specialized_code: bool | None = None,
        _optimize_einsums: bool | None = None,
        *,
        layout: str = "mul_ir",
    ) -> None:
        super().__init__()
        if normalization is not None:
            warnings.warn("normalization is deprecated; pass irrep_normalization", DeprecationWarning, stacklevel=2)
            irrep_normalization = normalization
        in1, in2 = read_irreps("irreps_in1", irreps_in1), read_irreps("irreps_in2", irreps_in2)
        out = read_irreps("irreps_out", irreps_out)
        variances = (in1_var, in2_var, out_var)
        paths = normalised(in1, in2, out, instructions, variances, irrep_normalization, path_normalization)
        self._set_up((in1, in2, out), paths, internal_weights, shared_weights, layout)

    def _set_up(
        self,
        irreps: tuple[Irreps, Irreps, Irreps],
        paths: tuple[Instruction, ...],
        internal_weights: bool | None,
        shared_weights: bool | None,
        layout: str,
        parts: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """The rest of construction, once paths are normalised; `parts` are weight and mask, if there are any yet."""
        if internal_weights and shared_weights is False:
            remedy = "share them, or pass the weights of each sample to forward"
            raise OperandError(f"internal_weights is True but shared_weights is False; {remedy}")
        self.irreps_in1, self.irreps_in2, self.irreps_out = irreps
        self.instructions, self.layout = list(paths), layout
        self._product = make_product(*irreps, paths, layout)
        self.weight_numel = self._product.weight_numel
        self.shared_weights = shared_weights is not False
        has_weights = any(path.has_weight for path in paths)
        self.internal_weights = self.shared_weights and has_weights if internal_weights is None else internal_weights
        weight, mask = parts if parts is not None else (self._new_weight(), self._new_mask())
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        else:
            self.register_buffer("weight", weight)
        self.register_buffer("output_mask", mask)
        if self._product.plan is None and all(own.dim for own in irreps):
            warnings.warn(
                f"no path leads from {irreps[0]} x {irreps[1]} to {irreps[2]}; the output is always zero", stacklevel=3
            )

    def _new_weight(self) -> Tensor:
        if self.internal_weights and self.weight_numel:
            return nn.Parameter(torch.randn(self.weight_numel))
        return torch.zeros(0)

    def _new_mask(self) -> Tensor:
        """1 where a path leads, 0 elsewhere."""
        fed = {path.i_out for path in self.instructions if path.path_weight != 0 and 0 not in path.path_shape}
        blocks = [torch.full((mul * ir.dim,), float(at in fed)) for at, (mul, ir) in enumerate(self.irreps_out)]
        return torch.cat(blocks) if blocks else torch.ones(0)

    def forward(
        self,
        x: Tensor,
        y: Tensor | GroupCOO,
        weight: Tensor | Sequence[Tensor] | None = None,
        *,
        src: Tensor | None = None,
        dst: Tensor | None = None,
        num_nodes: int | None = None,
    ) -> Tensor:
        """x [..., irreps_in1.dim] times y [..., irreps_in2.dim] is [..., irreps_out.dim]; leading dimensions broadcast.

        `weight` is [weight_numel] where weights are shared, else [..., weight_numel], or a list of the paths' own.
        A one-hot second input of scalars may be given as integers [...], the positions of its ones, or as a `GroupCOO`
        grouped by kind. With `src` and `dst` [edges], edge e multiplies row `src[e]` of x and adds its product to row
        `dst[e]` of `num_nodes`; a negative one is no edge.
        """
        return self._product(x, y, self._weights(weight), src, dst, num_nodes)

    def right(self, y: Tensor, weight: Tensor | Sequence[Tensor] | None = None) -> Tensor:
        """The matrix [..., irreps_in1.dim, irreps_out.dim] that x is multiplied by."""
        given = self._weights(weight)
        is_one_hot = not y.is_floating_point()
        like = y if not is_one_hot else self.output_mask if given is None else given
        x = torch.eye(self.irreps_in1.dim, dtype=like.dtype, device=y.device)
        if given is not None and given.dim() > 1:
            given = given.unsqueeze(-2)
        return self._product(x, y.unsqueeze(-1 if is_one_hot else -2), given)

    def weight_view_for_instruction(self, instruction: int, weight: Tensor | Sequence[Tensor] | None = None) -> Tensor:
        """The weights of one path, as a view of all of them, or of `weight`."""
        path = self.instructions[instruction]
        if not path.has_weight:
            raise OperandError(f"instruction {instruction} has no weights")
        start = sum(prod(before.path_shape) for before in self.instructions[:instruction] if before.has_weight)
        flat = self._needed_weights(weight)
        return flat.narrow(-1, start, prod(path.path_shape)).view(*flat.shape[:-1], *path.path_shape)

    def weight_views(
        self, weight: Tensor | Sequence[Tensor] | None = None, yield_instruction: bool = False
    ) -> Iterator[Tensor | tuple[int, Instruction, Tensor]]:
        """A view of each path's weights, in order; with `yield_instruction`, (number, instruction, view)."""
        flat, start = self._needed_weights(weight), 0
        for number, path in enumerate(self.instructions):
            if path.has_weight:
                size = prod(path.path_shape)
                view = flat.narrow(-1, start, size).view(*flat.shape[:-1], *path.path_shape)
                start += size
                yield (number, path, view) if yield_instruction else view

    def _needed_weights(self, weight: Tensor | Sequence[Tensor] | None) -> Tensor:
        flat = self._weights(weight)
        return self.weight if flat is None else flat

    def _weights(self, weight: Tensor | Sequence[Tensor] | None) -> Tensor | None:
        """The weights of one call; None: there are none."""
        if weight is None:
            if not self.weight_numel:
                return None
            if not self.internal_weights:
                shape = [self.weight_numel] if self.shared_weights else ["...", self.weight_numel]
                kind = f"[{', '.join(map(str, shape))}]"
                raise OperandError(f"no weight was given and internal_weights is False; pass weight {kind}")
            return self.weight
        if isinstance(weight, (list, tuple)):
            weight = self._joined(weight)
        if not isinstance(weight, Tensor):
            raise OperandError(f"weight is of type {type(weight).__name__}; pass a torch.Tensor, or one for each path")
        if self.shared_weights and weight.shape != (self.weight_numel,):
            raise ShapeError(
                f"weight is {list(weight.shape)}, but shared weights are [{self.weight_numel}]; "
                "for weights of each sample pass shared_weights=False"
            )
        if not self.shared_weights and weight.dim() < 2:
            raise ShapeError(
                f"weight is {list(weight.shape)}, but weights of each sample are [..., {self.weight_numel}]; "
                "for weights shared by all pass shared_weights=True"
            )
        return weight

    def _joined(self, weights: Sequence[Tensor]) -> Tensor:
        shapes = [path.path_shape for path in self.instructions if path.has_weight]
        if len(weights) != len(shapes):
            raise ShapeError(f"weight holds {len(weights)} tensors but {len(shapes)} paths have weights; give one each")
        return torch.cat([_flat(number, *own) for number, own in enumerate(zip(weights, shapes))], -1)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        """e3nn's checkpoints load as they are: coefficients are left aside, an old one without a mask keeps ours."""
        for key in [key for key in state_dict if key.startswith(tuple(prefix + own for own in FOREIGN_KEYS))]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)
        if f"{prefix}output_mask" in missing:
            missing.remove(f"{prefix}output_mask")

    def __repr__(self) -> str:
        """As e3nn writes it."""
        num_paths = sum(prod(path.path_shape) for path in self.instructions)
        sides = " x ".join(str(own.simplify()) for own in (self.irreps_in1, self.irreps_in2))
        sizes = f"{num_paths} paths | {self.weight_numel} weights"
        return f"{type(self).__name__}({sides} -> {self.irreps_out.simplify()} | {sizes})"


def _flat(number: int, own: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The weights of one path, [..., *shape] or already flat, as [..., numel]."""
    if not isinstance(own, Tensor):
        raise OperandError(f"weight[{number}] is of type {type(own).__name__}; pass a torch.Tensor")
    if tuple(own.shape[-len(shape) :]) == shape:
        return own.flatten(own.dim() - len(shape))
    if own.shape[-1:] != (prod(shape),):
        wanted = f"[..., {', '.join(map(str, shape))}] or [..., {prod(shape)}]"
        raise ShapeError(f"weight[{number}] is {list(own.shape)}, but the weights of its path are {wanted}")
    return own


class FullyConnectedTensorProduct(TensorProduct):
    """`Z[b,CGI[p,q],w] += CGV[p,q] * X[b,CGJ[p,q],u] * Y[b,CGK[p,q],v] * W[b,p,u,v,w]`, over every allowed path.

    Takes what `e3nn.o3.FullyConnectedTensorProduct` takes: change the import and keep weights and checkpoints.
    """

    def __init__(
        self,
        irreps_in1: Irreps,
        irreps_in2: Irreps,
        irreps_out: Irreps,
        irrep_normalization: str | None = None,
        path_normalization: str | None = None,
        **options: Any,
    ) -> None:
        in1, in2 = read_irreps("irreps_in1", irreps_in1), read_irreps("irreps_in2", irreps_in2)
        out = read_irreps("irreps_out", irreps_out)
        paths = fully_connected(in1, in2, out)
        options |= dict(irrep_normalization=irrep_normalization, path_normalization=path_normalization)
        super().__init__(in1, in2, out, paths, **options)
