"""e3nn's tensor products, with its names, weights and normalisations, as statements."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..compiler import InsumError, OperandError, ShapeError, has_kernels, shortened
from ..formats import GroupCOO
from ..formats.guard import may_keep
from ..not_scripted import NotScripted
from .clebsch_gordan import Irreps, read_irreps
from .paths import Instruction, IrrepNormalization, PathNormalization, Variances, fully_connected, normalised
from .product import make_product
from .slots import LayoutName

__all__ = ["FullyConnectedTensorProduct", "TensorProduct"]

# what else e3nn's state_dict may hold: coefficients that we compute
FOREIGN_KEYS = ("_compiled_main_", "_tensor_constant")


class TensorProduct(NotScripted, nn.Module):
    """`Z[b,w,k] += C[i,j,k] * W[u,v,w] * X[b,u,i] * Y[b,v,j]`, added up over paths.

    An equivariant tensor product that takes what `e3nn.o3.TensorProduct` takes, in its order and with its defaults, and
    has its attributes, weights and checkpoints. Each path multiplies a block of irreps of x with one of y by their
    Clebsch-Gordan coefficients C. What e3nn's class has and this one not: the modes "uvu<v" and "u<vw", which are
    refused, and `visualize`. What this one has beside e3nn's: `layout`, and edges and one-hot inputs in `forward`. e3nn
    must be installed (`pip install 'insum_ops[e3nn]'`).

    The weights of a path are [u, v, w] for mode uvw, [u, v] for uvu, uvv and uvuv, [u, w] for uuw and [u] for uuu, with
    u, v and w the multiplicities of its first input, second input and output. All of them one after the other are the
    `weight_numel` numbers of `weight`.

    Args:
        irreps_in1: irreps of the first input, a string such as "16x0e + 8x1o" or an `e3nn.o3.Irreps`.
        irreps_in2: irreps of the second input.
        irreps_out: irreps of the output.
        instructions: the paths, each `(i_in1, i_in2, i_out, mode, has_weight[, path_weight])`: numbers of the blocks,
            one of the modes uvw, uvu, uvv, uuw, uuu and uvuv, whether it has weights, and the square of a factor in
            front of it.
        in1_var: variance of each block of the first input; None for ones.
        in2_var: variance of each block of the second input; None for ones.
        out_var: variance that each block of the output is to have; None for ones.
        irrep_normalization: "component" (None means it), "norm" or "none", as in e3nn.
        path_normalization: "element" (None means it), "path" or "none", as in e3nn.
        internal_weights: whether `weight` [weight_numel] is a parameter of the layer; None: if weights are shared and
            there are any.
        shared_weights: whether all samples have the same weights; None for True. If False, `forward` takes a weight
            [..., weight_numel].
        compile_left_right: accepted for code written for e3nn, and ignored.
        compile_right: accepted for code written for e3nn, and ignored; `right` is always there.
        normalization: the deprecated name of irrep_normalization.
        _specialized_code: accepted for code written for e3nn, and ignored.
        _optimize_einsums: accepted for code written for e3nn, and ignored.
        layout: "mul_ir", e3nn's, each block [multiplicity, 2l+1], or "ir_mul", its transpose, which is read and written
            without a copy where multiplicities are equal.

    Raises:
        OperandError: irreps that e3nn can't read, an instruction that parity or angular momentum forbids, a variance,
            normalisation or layout that there is not, or internal weights that are not shared.
        ShapeError: multiplicities that do not fit a path's mode, or another number of variances than blocks.
        UnsupportedError: another connection mode, or mode uvw without weights.
        ImportError: e3nn is not installed.

    Example:
        >>> import torch
        >>> from insum_ops.nn import TensorProduct
        >>> paths = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (0, 1, 1, "uvu", True)]
        >>> layer = TensorProduct("4x0e + 4x1o", "1x0e + 1x1o", "4x0e + 4x1o", paths)
        >>> layer
        TensorProduct(4x0e+4x1o x 1x0e+1x1o -> 4x0e+4x1o | 12 paths | 12 weights)
        >>> layer(torch.randn(10, 16), torch.randn(10, 4)).shape
        torch.Size([10, 16])
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
        irrep_normalization: IrrepNormalization | None = None,
        path_normalization: PathNormalization | None = None,
        internal_weights: bool | None = None,
        shared_weights: bool | None = None,
        compile_left_right: bool = True,
        compile_right: bool = False,
        normalization: IrrepNormalization | None = None,
        _specialized_code: bool | None = None,
        _optimize_einsums: bool | None = None,
        *,
        layout: LayoutName = "mul_ir",
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
        """Construct what follows from normalised paths. `parts` is (weight, output_mask) of a layer to be replaced."""
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
        self._prepare()
        if self._product.decomposition is None and all(side.dim for side in irreps):
            warnings.warn(
                f"no path leads from {irreps[0]} x {irreps[1]} to {irreps[2]}; the output is always zero", stacklevel=3
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the layer's tensors, and have its tables where they are now."""
        super()._apply(fn, recurse)
        self._prepare()
        return self

    def _prepare(self) -> None:
        """Copy the tables to the layer's device, if kernels run there: its first call may be a compiled one."""
        mask = self.output_mask
        if may_keep(mask) and not mask.is_meta and has_kernels(mask.device):
            self._product.prepare(mask.device, mask.dtype)

    def _new_weight(self) -> Tensor:
        """Return normally distributed weights as a parameter, or an empty tensor if the layer has none of its own."""
        if self.internal_weights and self.weight_numel:
            return nn.Parameter(torch.randn(self.weight_numel))
        return torch.zeros(0)

    def _new_mask(self) -> Tensor:
        """Return a mask of the output's columns, 1 where a path leads and 0 elsewhere."""
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
        """Multiply two inputs: x [..., irreps_in1.dim] times y [..., irreps_in2.dim] is [..., irreps_out.dim].

        With `src` and `dst`, edge e multiplies row `src[e]` of x by row e of y and adds its product to row `dst[e]` of
        the result, as a layer of message passing does.

        Args:
            x: first input [..., irreps_in1.dim]; [nodes, irreps_in1.dim] with edges.
            y: second input [..., irreps_in2.dim]; [edges, irreps_in2.dim] with edges. A one-hot second input of scalars
                may be given as integers [...], the positions of its ones, or as a `GroupCOO` grouped by kind.
            weight: [weight_numel] where weights are shared, else [..., weight_numel], or a list of the paths' own; None
                for the layer's.
            src: the row of x that each edge multiplies, integers [edges]; a negative one is no edge.
            dst: the row of the result that each edge adds to, integers [edges]; a negative one is no edge.
            num_nodes: rows of the result with edges; None for as many as x has.

        Returns:
            [..., irreps_out.dim], the leading dimensions of x, y and weight broadcast; [num_nodes, irreps_out.dim] with
            edges.

        Raises:
            OperandError: no weight where the layer has none of its own, or tensors of wrong types, two dtypes or two
                devices.
            ShapeError: a last dimension that is not that of its irreps, leading dimensions that do not broadcast, a
                weight of another shape, or edges of different numbers.
            IndexRangeError: `src`, `dst` or a position in y is out of range.
            UnsupportedError: a `GroupCOO` where none can stand.

        Example:
            >>> import torch
            >>> from insum_ops.nn import TensorProduct
            >>> layer = TensorProduct("4x0e", "1x0e + 1x1o", "4x1o", [(0, 1, 0, "uvu", True)], shared_weights=False)
            >>> nodes, edges, weight = torch.randn(5, 4), torch.randn(9, 4), torch.randn(9, layer.weight_numel)
            >>> src, dst = torch.randint(5, (2, 9))
            >>> layer(nodes, edges, weight, src=src, dst=dst).shape
            torch.Size([5, 12])
        """
        try:
            return self._product(x, y, self._weights(weight), src, dst, num_nodes)
        except InsumError as error:
            raise shortened(error) from error.__cause__

    if TYPE_CHECKING:
        # nn.Module's own returns Any
        def __call__(
            self,
            x: Tensor,
            y: Tensor | GroupCOO,
            weight: Tensor | Sequence[Tensor] | None = None,
            *,
            src: Tensor | None = None,
            dst: Tensor | None = None,
            num_nodes: int | None = None,
        ) -> Tensor: ...

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled layer; what an older version planned is planned again."""
        super().__setstate__(state)
        if "text" not in vars(self._product):
            irreps = self.irreps_in1, self.irreps_in2, self.irreps_out
            self._product = make_product(*irreps, tuple(self.instructions), self.layout)
        self._prepare()

    def right(self, y: Tensor, weight: Tensor | Sequence[Tensor] | None = None) -> Tensor:
        """Return the matrix [..., irreps_in1.dim, irreps_out.dim] that x is multiplied by.

        Args:
            y: second input [..., irreps_in2.dim], or integers [...], the positions of the ones of a one-hot one.
            weight: [weight_numel] where weights are shared, else [..., weight_numel], or a list of the paths' own; None
                for the layer's.

        Returns:
            [..., irreps_in1.dim, irreps_out.dim], so that `x @ layer.right(y)` is `layer(x, y)` for one sample.

        Raises:
            OperandError: as `forward` does.
            ShapeError: as `forward` does.

        Example:
            >>> import torch
            >>> from insum_ops.nn import FullyConnectedTensorProduct
            >>> FullyConnectedTensorProduct("4x0e", "1x0e", "8x0e").right(torch.randn(10, 1)).shape
            torch.Size([10, 4, 8])
        """
        weights = self._weights(weight)
        is_one_hot = not y.is_floating_point()
        like = y if not is_one_hot else self.output_mask if weights is None else weights
        x = torch.eye(self.irreps_in1.dim, dtype=like.dtype, device=y.device)
        if weights is not None and weights.dim() > 1:
            weights = weights.unsqueeze(-2)
        return self._product(x, y.unsqueeze(-1 if is_one_hot else -2), weights)

    def weight_view_for_instruction(self, instruction: int, weight: Tensor | Sequence[Tensor] | None = None) -> Tensor:
        """Return the weights of one path, as a view of all of them.

        Args:
            instruction: the number of the path in `instructions`.
            weight: [..., weight_numel] to look into; None for the layer's own.

        Returns:
            [..., *path_shape], for example [..., u, v, w] for mode uvw.

        Raises:
            OperandError: the path has no weights, or none was given and the layer has none of its own.
            ShapeError: `weight` has another shape.
            IndexError: there is no such path.

        Example:
            >>> from insum_ops.nn import FullyConnectedTensorProduct
            >>> FullyConnectedTensorProduct("4x0e", "2x0e", "8x0e").weight_view_for_instruction(0).shape
            torch.Size([4, 2, 8])
        """
        path = self.instructions[instruction]
        if not path.has_weight:
            raise OperandError(f"instruction {instruction} has no weights")
        start = sum(prod(before.path_shape) for before in self.instructions[:instruction] if before.has_weight)
        flat = self._needed_weights(weight)
        return flat.narrow(-1, start, prod(path.path_shape)).view(*flat.shape[:-1], *path.path_shape)

    def weight_views(
        self, weight: Tensor | Sequence[Tensor] | None = None, yield_instruction: bool = False
    ) -> Iterator[Tensor | tuple[int, Instruction, Tensor]]:
        """Yield a view of each path's weights, in order.

        Args:
            weight: [..., weight_numel] to look into; None for the layer's own.
            yield_instruction: whether to yield (number, instruction, view) instead of the view alone.

        Yields:
            [..., *path_shape] of each path that has weights.

        Raises:
            OperandError: none was given and the layer has none of its own.
            ShapeError: `weight` has another shape.

        Example:
            >>> from insum_ops.nn import FullyConnectedTensorProduct
            >>> layer = FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e", "8x0e + 3x1o")
            >>> [list(view.shape) for view in layer.weight_views()]
            [[4, 1, 8], [2, 1, 3]]
        """
        flat, start = self._needed_weights(weight), 0
        for number, path in enumerate(self.instructions):
            if path.has_weight:
                size = prod(path.path_shape)
                view = flat.narrow(-1, start, size).view(*flat.shape[:-1], *path.path_shape)
                start += size
                yield (number, path, view) if yield_instruction else view

    def _needed_weights(self, weight: Tensor | Sequence[Tensor] | None) -> Tensor:
        """Return the weights of one call, an empty tensor if there are none."""
        flat = self._weights(weight)
        return self.weight if flat is None else flat

    def _weights(self, weight: Tensor | Sequence[Tensor] | None) -> Tensor | None:
        """Return the weights of one call, checked, or None if no path has any.

        Raises OperandError or ShapeError where the call's weights are missing or of another shape than the layer's.
        """
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
        """Return the paths' weights as one flat tensor [..., weight_numel]."""
        shapes = [path.path_shape for path in self.instructions if path.has_weight]
        if len(weights) != len(shapes):
            raise ShapeError(f"weight holds {len(weights)} tensors but {len(shapes)} paths have weights; give one each")
        flat = [_flat(number, weight, shape) for number, (weight, shape) in enumerate(zip(weights, shapes))]
        return torch.cat(flat, -1)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        """Load checkpoints of e3nn too: its coefficients are ignored, and one without a mask leaves the layer's."""
        for key in [key for key in state_dict if key.startswith(tuple(prefix + foreign for foreign in FOREIGN_KEYS))]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)
        if f"{prefix}output_mask" in missing:
            missing.remove(f"{prefix}output_mask")

    def __repr__(self) -> str:
        """Return the text that e3nn prints for the product."""
        num_paths = sum(prod(path.path_shape) for path in self.instructions)
        sides = " x ".join(str(side_irreps.simplify()) for side_irreps in (self.irreps_in1, self.irreps_in2))
        sizes = f"{num_paths} paths | {self.weight_numel} weights"
        return f"{type(self).__name__}({sides} -> {self.irreps_out.simplify()} | {sizes})"


def _flat(number: int, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the weights of one path, [..., *shape] or already flat, as [..., numel]; refuse another shape."""
    if not isinstance(weight, Tensor):
        raise OperandError(f"weight[{number}] is of type {type(weight).__name__}; pass a torch.Tensor")
    if tuple(weight.shape[-len(shape) :]) == shape:
        return weight.flatten(weight.dim() - len(shape))
    if weight.shape[-1:] != (prod(shape),):
        shapes = f"[..., {', '.join(map(str, shape))}] or [..., {prod(shape)}]"
        raise ShapeError(f"weight[{number}] is {list(weight.shape)}, but the weights of its path are {shapes}")
    return weight


class FullyConnectedTensorProduct(TensorProduct):
    """`Z[b,CGI[p,q],w] += CGV[p,q] * X[b,CGJ[p,q],u] * Y[b,CGK[p,q],v] * W[b,p,u,v,w]`, over every allowed path.

    It takes what `e3nn.o3.FullyConnectedTensorProduct` takes: change the import and keep weights and checkpoints. There
    is a path, of mode uvw with weights [u, v, w], for each three blocks of irreps that angular momentum and parity
    allow.

    Args:
        irreps_in1: irreps of the first input, a string such as "16x0e + 8x1o" or an `e3nn.o3.Irreps`.
        irreps_in2: irreps of the second input.
        irreps_out: irreps of the output.
        irrep_normalization: "component" (None means it), "norm" or "none", as in e3nn.
        path_normalization: "element" (None means it), "path" or "none", as in e3nn.
        **options: further arguments of `TensorProduct`, such as `shared_weights`, `internal_weights` and `layout`.

    Raises:
        OperandError: irreps that e3nn can't read, a variance, normalisation or layout that there is not, or internal
            weights that are not shared.
        ShapeError: another number of variances than blocks.
        TypeError: an option that `TensorProduct` does not have.
        ImportError: e3nn is not installed.

    Example:
        >>> import torch
        >>> from insum_ops.nn import FullyConnectedTensorProduct
        >>> layer = FullyConnectedTensorProduct("4x0e + 4x1o", "1x0e + 1x1o", "8x0e + 8x1o")
        >>> layer
        FullyConnectedTensorProduct(4x0e+4x1o x 1x0e+1x1o -> 8x0e+8x1o | 128 paths | 128 weights)
        >>> layer(torch.randn(10, 16), torch.randn(10, 4)).shape, layer.weight.shape
        (torch.Size([10, 32]), torch.Size([128]))
    """

    def __init__(
        self,
        irreps_in1: Irreps,
        irreps_in2: Irreps,
        irreps_out: Irreps,
        irrep_normalization: IrrepNormalization | None = None,
        path_normalization: PathNormalization | None = None,
        **options: Any,
    ) -> None:
        in1, in2 = read_irreps("irreps_in1", irreps_in1), read_irreps("irreps_in2", irreps_in2)
        out = read_irreps("irreps_out", irreps_out)
        paths = fully_connected(in1, in2, out)
        options |= dict(irrep_normalization=irrep_normalization, path_normalization=path_normalization)
        super().__init__(in1, in2, out, paths, **options)
