"""BlockSparseLinear: a linear layer that stores and trains only some blocks of its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..compiler import InsumError, OperandError, outside_modes, shortened, takes_composites
from ..formats import BlockCOO
from ..formats.convert import split_blocks
from ..formats.guard import ChangeGuards, may_keep
from ..formats.torch_state import (
    default_dtype,
    is_compiling,
    is_dynamo,
    is_stand_in,
    is_traced,
    modes,
    undifferentiated,
)
from ..not_scripted import NotScripted
from .patterns import (
    block_grid,
    block_norms,
    check_block_size,
    check_density,
    check_dtype,
    check_features,
    check_generator,
    check_mask,
    check_threshold,
    inside,
    is_pattern,
    largest,
    num_blocks,
    random_mask,
    row_bounds,
    uniform,
    weight_and_bias,
)
from .product import EXPR, padded_product, product, product_of_parts, replayed_product, traced_layer
from .remap import check_optimizer, holders, moved_states, put_states, resize_, sources, take
from .sharded import agreed, held_weight, shards_of
from .state import Blocked, mismatch
from .weight_format import WeightFormat, check_blocks, make_weight_format

__all__ = ["BlockSparseLinear"]

Layer = TypeVar("Layer", bound="BlockSparseLinear")
OVERWRITTEN = (
    "coords was overwritten with another pattern than the one that the blocks of weight belong to, as an average over "
    "buffers leaves it; give the layer another with set_pattern_(mask) or load_state_dict, and average without it, as "
    "AveragedModel does with use_buffers=False"
)


class BlockSparseLinear(NotScripted, nn.Module):
    """`Y[t,o] += X[t,i] * W[o,i]`: `nn.Linear` with only some blocks of the weight stored and trained.

    `weight` [blocks, *block_size] holds the stored blocks, `coords` [2, blocks] their block rows and columns, in
    ascending order. The input may have any number of leading dimensions. Blocks need not divide the features: the last
    ones are filled up with zeros. Blocks of 16 to 128 suit Tensor Cores.

    A random pattern stores the share `density` of all blocks, rounded, and at least one in every block row unless
    `allow_empty_rows`, so that no output is left without inputs; a very low density is then exceeded. The pattern
    depends on the seed and not on the device.

    To change the pattern, use `set_pattern_`, `prune_`, `load_patterns_` or `load_state_dict`, or assign a tensor to
    `coords`. If `coords` is overwritten in place, as an average over buffers does, the layer refuses to compute and to
    be saved; a graph of `torch.compile` does not compare, and multiplies by the blocks where `coords` has put them.
    Writes that torch does not count, such as `coords.data[0] = 1` or those through numpy, go unnoticed.

    Under DistributedDataParallel pass `broadcast_buffers=False`, or the pattern is sent and compared at every step. In
    an `nn.TransformerEncoderLayer` the layer is called for inference too, where torch would read the weight of an
    `nn.Linear` itself.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        block_size: rows and columns of a block, (out, in), or one number for both; neither has to divide the features.
        density: share of blocks to store, above 0 and up to 1; not used with a pattern.
        bias: whether a trained bias [out_features] is added.
        device: where the parameters lie.
        dtype: of what type they are: float16, bfloat16, float32 or float64; None for torch's default.
        pattern: bool mask [out_blocks, in_blocks] of the blocks to store, in the place of random ones.
        allow_empty_rows: whether a random pattern may leave a block row without blocks.
        generator: what draws the pattern and the weights; None for torch's global one.

    Raises:
        ShapeError: features or blocks below 1, a block larger than the matrix, or a pattern of another shape.
        OperandError: a density, dtype, pattern or generator of a wrong kind; the message says which.

    Example:
        >>> import torch
        >>> from insum_ops.nn import BlockSparseLinear
        >>> layer = BlockSparseLinear(256, 128, block_size=32, density=0.25)
        >>> layer.coords.shape, layer.weight.shape, layer.mask.shape, layer.density
        (torch.Size([2, 8]), torch.Size([8, 32, 32]), torch.Size([4, 8]), 0.25)
        >>> layer(torch.randn(2, 10, 256)).shape
        torch.Size([2, 10, 128])
    """

    EXPR = EXPR

    bias: nn.Parameter | None
    coords: Tensor
    _settled: ChangeGuards | None = None  # of the pattern that the blocks belong to; None: it has not been used yet
    _weight_format: WeightFormat | None = None  # here and not in the constructor: pickles of version 0.1.0 have none

    def __init__(
        self,
        in_features: int,
        out_features: int,
        block_size: int | Sequence[int] = (32, 32),
        density: float = 0.1,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        pattern: Tensor | None = None,
        allow_empty_rows: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.in_features = check_features("in_features", in_features)
        self.out_features = check_features("out_features", out_features)
        self.block_size = check_block_size(block_size, (self.out_features, self.in_features))
        self.grid = block_grid((self.out_features, self.in_features), self.block_size)
        density = check_density(density)
        check_dtype("dtype", dtype or default_dtype())
        check_generator(generator)
        shift = nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", shift)
        start = torch.empty((), device=device)
        if pattern is not None:
            check_mask("pattern", pattern, self.grid, start.device)
        with outside_modes(pattern):  # of a pattern that is drawn the number of blocks is known
            mask = random_mask(self.grid, density, allow_empty_rows, generator) if pattern is None else pattern
            coords = _listed(mask, start.device)
        if is_stand_in(start):  # everything else of the layer is
            coords = torch.empty(coords.shape, dtype=coords.dtype, device=start.device)
        self.register_buffer("coords", coords)
        self.weight = nn.Parameter(torch.empty(coords.shape[1], *self.block_size, device=device, dtype=dtype))
        self._allow_empty_rows = allow_empty_rows
        self._is_undrawn = False  # memory that to_empty gave to a layer on the meta device, which has no pattern
        self.reset_parameters(generator)

    @classmethod
    def from_dense(
        cls: type[Layer],
        dense: nn.Linear | Tensor,
        block_size: int | Sequence[int] = (32, 32),
        density: float | None = None,
        threshold: float | None = None,
        *,
        bias: Tensor | None = None,
    ) -> Layer:
        """Return a layer with those blocks of a trained `nn.Linear`, or weight, that are largest by Frobenius norm.

        A block row whose blocks are all small is left empty. From an `nn.Linear` it also takes the bias, what of it is
        trained and the mode that it is in.

        Args:
            dense: an `nn.Linear`, or its weight [out_features, in_features].
            block_size: rows and columns of a block, (out, in), or one number for both.
            density: share of blocks to keep, above 0 and up to 1; give this or threshold.
            threshold: the norm that a kept block exceeds; 0 keeps every block that is not all zeros.
            bias: bias [out_features] that goes with a weight; a Linear brings its own.

        Returns:
            A `BlockSparseLinear` with copies of the blocks, on the device and of the dtype of `dense`.

        Raises:
            OperandError: not exactly one of density and threshold is given, or an argument is of a wrong kind.
            ShapeError: the weight is no matrix, the bias does not fit it, or a block is larger than it.

        Example:
            >>> import torch
            >>> from insum_ops.nn import BlockSparseLinear
            >>> layer = BlockSparseLinear.from_dense(torch.nn.Linear(64, 64), block_size=16, density=0.5)
            >>> layer.mask.sum()
            tensor(8)
        """
        weight, bias = weight_and_bias(dense, bias)
        if (density is None) == (threshold is None):
            problem = "neither is given" if density is None else "both are given"
            raise OperandError(f"one of density and threshold says which blocks to keep, but {problem}")
        out_features, in_features = weight.shape
        block_size = check_block_size(block_size, (out_features, in_features))
        blocks = split_blocks(weight, block_size)
        norms = block_norms(blocks)
        if density is not None:
            mask = largest(norms, num_blocks(check_density(density), (norms.shape[0], norms.shape[1])))
        else:
            mask = ~(norms <= check_threshold(threshold))  # a NaN is kept, to be seen
        apart = torch.Generator(weight.device)  # what it draws is overwritten, so the global seed should not move
        layer = cls(
            *(in_features, out_features, block_size, 1.0, bias is not None, weight.device, weight.dtype),
            pattern=mask,
            generator=apart,
        )
        with torch.no_grad():
            layer.weight.copy_(blocks[mask])
            if layer.bias is not None and bias is not None:
                layer.bias.copy_(bias)
        if isinstance(dense, nn.Linear):
            layer.weight.requires_grad_(dense.weight.requires_grad)
            if layer.bias is not None:
                layer.bias.requires_grad_(dense.bias.requires_grad)
            layer.train(dense.training)
        return layer

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw new weights, uniform within 1 / sqrt(inputs that the output really has), as `nn.Linear` does.

        The pattern stays. Where there is none, since the layer was on the meta device, it is drawn first, so that the
        same seed gives the same layer as it does without the detour.

        Args:
            generator: what draws them; None for torch's global one.

        Raises:
            OperandError: `generator` is no `torch.Generator`.

        Example:
            >>> import torch
            >>> from insum_ops.nn import BlockSparseLinear
            >>> layer = BlockSparseLinear(64, 64, block_size=16, density=0.5)
            >>> layer.reset_parameters(torch.Generator().manual_seed(0))
        """
        check_generator(generator)
        self._settled = None
        if self.coords.is_meta or is_stand_in(self.coords):
            return
        if self._is_undrawn or not is_pattern(self.coords, self.grid):
            self._draw_pattern(generator)
        bound = row_bounds(self.coords, self.grid, self.block_size[1], self.in_features)
        with torch.no_grad():
            self.weight.copy_(self._drawn_blocks(self.coords, generator))
            if self.bias is not None:
                rows = bound.repeat_interleave(self.block_size[0])[: self.out_features]
                self.bias.copy_(uniform(rows.to(self.bias.dtype), generator))

    def forward(self, x: Tensor) -> Tensor:
        """`Y[t,o] += X[t,i] * W[o,i]`, plus the bias.

        Args:
            x: input [..., in_features], of the weight's dtype or under autocast.

        Returns:
            Output [..., out_features].

        Raises:
            OperandError: x is no dense tensor of the weight's dtype and device, `coords` was overwritten with another
                pattern, or it lists none, as after `to_empty`.
            ShapeError: the last dimension of x is not in_features, or there is not a block of `weight` for each column
                of `coords`.

        Example:
            >>> import torch
            >>> from insum_ops.nn import BlockSparseLinear
            >>> BlockSparseLinear(64, 48, block_size=16, density=0.5)(torch.randn(7, 64)).shape
            torch.Size([7, 48])
        """
        own = self._parameters  # as in `_parameter`, whose calls would cost more than what they do
        weight: Any = own["weight"] if "weight" in own else self.weight  # noqa: SIM401 - asked for only if it is gone
        bias = own["bias"] if "bias" in own else self.bias  # noqa: SIM401
        value = None if is_dynamo() else self._replayed(x, weight, bias)
        return self._multiplied(x, weight, bias) if value is None else value

    if TYPE_CHECKING:
        # nn.Module's own returns Any
        def __call__(self, x: Tensor) -> Tensor: ...

    def _replayed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the product by its launch plan, None if it has none for tensors like these."""
        cached = self._weight_format
        if cached is None or cached.coords is not self._buffers["coords"] or not cached.guard.hold():
            return None
        form = cached.form
        if form.values is not weight or not isinstance(x, Tensor):
            return None
        return replayed_product(x, form, bias, form.shape != (self.out_features, self.in_features))

    def _multiplied(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Check x, and return the product where it has no launch plan; a tracer may read the code."""
        if not isinstance(x, Tensor):
            raise OperandError(f"x is of type {type(x).__name__}; pass a tensor [..., in_features]")
        if not isinstance(weight, Tensor):
            raise OperandError(f"weight is of type {type(weight).__name__}; it must be a tensor [blocks, *block_size]")
        if x.is_nested:
            raise OperandError(
                "x is a nested tensor; pass a padded one, as x.to_padded_tensor(0.0), and give an "
                "nn.TransformerEncoder that makes them enable_nested_tensor=False"
            )
        features = self.out_features, self.in_features
        if is_dynamo() and takes_composites():
            return traced_layer(x, weight, bias, self.coords, features, self.block_size)  # type: ignore[no-any-return]
        try:
            is_followed = is_compiling() or modes() > 0
            if is_dynamo() or (is_followed and is_traced((x, weight))):
                return product_of_parts(x, weight, bias, self.coords, features, self.block_size)
            W = self._format(weight, is_followed and is_compiling())
            anew = lambda: padded_product(x, W, bias, self.coords, features, self.block_size)
            return anew() if is_followed else product(x, W, bias, anew, W.shape != features)
        except InsumError as error:
            raise shortened(error) from error.__cause__

    def prune_(self, density: float, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Keep the largest stored blocks by Frobenius norm, `density` of all blocks, and drop the others, in place.

        Parameters and optimizers are treated as by `set_pattern_`.

        Args:
            density: share of all blocks to keep, above 0 and at most what is stored.
            optimizer: the only optimizer that holds the weight; None to look for all.

        Raises:
            OperandError: `density` is no share or more than is stored, the optimizer does not hold the weight, or the
                pattern can't be changed; see `set_pattern_`.

        Example:
            >>> from insum_ops.nn import BlockSparseLinear
            >>> layer = BlockSparseLinear(64, 64, block_size=16, density=0.5)
            >>> layer.prune_(0.25)
            >>> layer.density, list(layer.weight.shape)
            (0.25, [4, 16, 16])
        """
        shards = shards_of(self)
        with agreed(shards, density=density):
            count, stored = num_blocks(check_density(density), self.grid), self.coords.shape[1]
            if count > stored:
                raise OperandError(
                    f"density is {density}, which is {count} blocks, but {stored} are stored; set_pattern_ adds blocks"
                )
            if shards is None:
                self._format(self.weight, is_compiling())  # refuses what is no pattern
            self._settle()
        weight = self.weight.detach() if shards is None else shards.whole()
        rows, columns = self.coords.long()
        norms = torch.full(self.grid, -1.0, dtype=torch.float64, device=self.coords.device)
        norms[rows, columns] = block_norms(weight * self._inside(self.coords)).double()
        self.set_pattern_(largest(norms, count), optimizer=optimizer)

    def set_pattern_(
        self,
        mask: Tensor,
        *,
        init: Literal["zeros", "random"] = "zeros",
        optimizer: torch.optim.Optimizer | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Store the blocks of a mask, in place: kept ones keep their values.

        `weight` stays the same Parameter; its gradient is dropped. The state that an optimizer has for kept blocks is
        kept too. Of an optimizer that is no torch.optim.Optimizer forget the state yourself. A DistributedDataParallel
        wrapper must be made anew. Under `fully_shard` all ranks call it together, after
        `import insum_ops.distributed`; `weight` is another Parameter then, which optimizers get.

        Args:
            mask: bool [out_blocks, in_blocks], true for each block to store.
            init: how new blocks start: "zeros", or "random" like those of a new layer.
            optimizer: the only optimizer that holds the weight; None to look for every torch.optim.Optimizer that does,
                among all objects of the process; one that `gc.freeze` has set aside is not among them.
            generator: what draws new blocks; None for torch's global one.

        Raises:
            OperandError: mask, init, optimizer or generator of a wrong kind, an optimizer that does not hold the
                weight, a layer on the meta device or with a parametrized weight, or `coords` was overwritten with
                another pattern.
            ShapeError: the mask has another shape.

        Example:
            >>> import torch
            >>> from insum_ops.nn import BlockSparseLinear
            >>> layer = BlockSparseLinear(64, 64, block_size=16, density=0.5)
            >>> layer.set_pattern_(torch.eye(4, dtype=torch.bool))
            >>> layer.coords.tolist()
            [[0, 1, 2, 3], [0, 1, 2, 3]]
        """
        shards = shards_of(self)
        with agreed(shards, mask=mask, init=init):
            self._check_change(mask, init, generator)
            self._settle()
            weight = held_weight(self, shards)
            if optimizer is not None:
                check_optimizer(optimizer, weight)
        self._change_pattern(mask, holders([weight]) if optimizer is None else [optimizer], init, generator)

    @property
    def _pattern_sizes(self) -> Blocked:
        """The sizes that a saved pattern has."""
        return self

    def _own_share(self, mask: Tensor) -> Tensor:
        """Return what this layer stores of a saved pattern: all of it, unless it is split over ranks."""
        return mask

    def _check_change(self, mask: Tensor, init: str = "zeros", generator: torch.Generator | None = None) -> None:
        if self.coords.is_meta:
            raise OperandError("the layer is on the meta device; give it memory first, with .to_empty(device=...)")
        check_mask("mask", mask, self.grid, self.coords.device)
        if "weight" not in self._parameters:
            raise OperandError(
                "weight is parametrized, so its blocks are not stored here; remove the parametrization first"
            )
        if init not in ("zeros", "random"):
            raise OperandError(f"init is {init!r}; choose from 'zeros' and 'random'")
        check_generator(generator)
        self._check_filled(mask)

    def _check_filled(self, mask: Tensor) -> None:
        """Refuse a pattern without blocks under `fully_shard`, whose next backward pass would raise."""
        if shards_of(self) is not None and not mask.any():
            raise OperandError(
                "the pattern leaves no block here, but fully_shard trains no empty parameter; keep one block or more "
                "on each rank"
            )

    def _change_pattern(
        self,
        mask: Tensor,
        optimizers: Sequence[torch.optim.Optimizer],
        init: str = "zeros",
        generator: torch.Generator | None = None,
    ) -> None:
        coords, old = _listed(mask, self.coords.device), self.coords
        if not is_pattern(old, self.grid):
            old = old[:, :0]  # whatever to_empty found in memory
        with torch.inference_mode(self.weight.is_inference()):  # what can be trained still can, wherever it is changed
            shards, source = shards_of(self), sources(old, coords, self.grid)
            blocks = take(self.weight.detach() if shards is None else shards.whole(), source)
            if init == "random":
                blocks = torch.where((source < 0).view(-1, 1, 1), self._drawn_blocks(coords, generator), blocks)
            if shards is not None:
                shards.change(blocks, source, optimizers)
                self.coords, self._is_undrawn, self._weight_format = coords, False, None
                return
            moved = moved_states(optimizers, self.weight, source)
            put_states(moved, self.weight)  # nothing has changed before, so that nothing is left half changed
            resize_(self.weight, blocks)
            self.coords, self._is_undrawn = coords, False
            self._format(self.weight, is_compiling())  # known anew now, since the next call may be a compiled one

    @property
    def mask(self) -> Tensor:
        """Which blocks are stored: bool [out_blocks, in_blocks]."""
        mask = torch.zeros(self.grid, dtype=torch.bool, device=self.coords.device)
        mask[tuple(self.coords.long())] = True
        return mask

    @property
    def density(self) -> float:
        """The share of blocks that are stored."""
        return self.coords.shape[1] / (self.grid[0] * self.grid[1])

    def as_format(self) -> BlockCOO:
        """Return the weight as the statement reads it, with its sides rounded up to whole blocks.

        It is for `explain(layer.EXPR, X=x, W=layer.as_format())`.

        Returns:
            A `BlockCOO` [out_blocks * block_size[0], in_blocks * block_size[1]] over `weight`, not a copy, and over a
            copy of the pattern.

        Raises:
            OperandError: `coords` was overwritten with another pattern, or lists none, as after `to_empty`.
            ShapeError: there is not a block of `weight` for each column of `coords`.

        Example:
            >>> from insum_ops.nn import BlockSparseLinear
            >>> BlockSparseLinear(60, 64, block_size=16, density=0.5).as_format().shape
            (64, 64)
        """
        return self._checked_format().as_shared()

    def _checked_format(self) -> BlockCOO:
        """Return what `_format` does; refuse a weight that was given another number of blocks in place."""
        weight = self._parameter("weight")
        check_blocks(weight, self.coords, self.block_size)
        return self._format(weight, is_compiling())

    def _format(self, weight: Tensor, is_compiled: bool) -> BlockCOO:
        """Return the layer's weight as the statement reads it, over a pattern that nobody else has.

        If a tracer reads the code, the pattern is not compared with `coords`.
        """
        cached = self._weight_format
        coords: Any = self._buffers["coords"]
        if not is_compiled:
            coords = undifferentiated(coords)
        if cached is None or not (is_compiled or (cached.coords is coords and cached.guard.hold())):
            self._settle()
            check_blocks(weight, self.coords, self.block_size)
            cached = make_weight_format(coords, weight, self.grid, cached)
            if may_keep(cached.coords, cached.pattern, cached.form.values):
                self._weight_format = cached
                self._is_undrawn = False  # the pattern that it holds by now was written there
        form = cached.form
        if form.values is not weight:  # another Parameter, or a call with other values by torch.func
            check_blocks(weight, self.coords, self.block_size)
            form = form.with_values(weight)
            if isinstance(weight, nn.Parameter) and may_keep(weight, cached.pattern):
                self._weight_format = replace(cached, form=form)
        return form

    def _settle(self) -> None:
        """Keep a copy of the pattern from its first use on, and raise if another one was written over it."""
        coords, settled = self.coords, self._settled
        if coords.is_meta or not may_keep(coords):
            return
        is_current = settled is not None and settled.tensors[0] is coords
        if settled is not None and is_current and settled.hold():
            return
        if settled is None or not is_current or not settled.have_kept_values():
            if not is_pattern(coords, self.grid):
                return  # `make_weight_format` refuses it
            if is_current:
                raise OperandError(OVERWRITTEN)
        self._settled = ChangeGuards([coords])
        self._settled.keep_values()

    def _parameter(self, name: str) -> Any:
        """Return `self.weight` or `self.bias`; the dict takes a tenth of the time of `nn.Module.__getattr__`."""
        return self._parameters[name] if name in self._parameters else getattr(self, name)

    def to_dense(self) -> Tensor:
        """Return the weight as a dense matrix, zero where no block is stored; differentiable.

        Returns:
            [out_features, in_features].

        Raises:
            OperandError: `coords` was overwritten with another pattern, or lists none, as after `to_empty`.
            ShapeError: there is not a block of `weight` for each column of `coords`.

        Example:
            >>> from insum_ops.nn import BlockSparseLinear
            >>> BlockSparseLinear(60, 64, block_size=16, density=0.5).to_dense().shape
            torch.Size([64, 60])
        """
        return self._checked_format().to_dense()[: self.out_features, : self.in_features]

    def to_linear(self) -> nn.Linear:
        """Return an `nn.Linear` that computes the same.

        Returns:
            A layer with copies of the weight and bias, on the same device, of the same dtype and in the same mode.

        Raises:
            OperandError: `coords` was overwritten with another pattern, or lists none, as after `to_empty`.
            ShapeError: there is not a block of `weight` for each column of `coords`.

        Example:
            >>> from insum_ops.nn import BlockSparseLinear
            >>> BlockSparseLinear(60, 64, block_size=16, density=0.5).to_linear()
            Linear(in_features=60, out_features=64, bias=True)
        """
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.to_dense().detach().contiguous(), self.weight.requires_grad)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone(), self.bias.requires_grad)
        return linear.train(self.training)

    def extra_repr(self) -> str:
        """Return what `repr` shows between the parentheses."""
        stored, total = self.coords.shape[1], self.grid[0] * self.grid[1]
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, block_size={self.block_size}, "
            f"blocks={stored}/{total}, density={self.density:.3g}, bias={self.bias is not None}, {self.EXPR}"
        )

    def _inside(self, coords: Tensor) -> Tensor:
        return inside(coords, self.block_size, (self.out_features, self.in_features))

    def _drawn_blocks(self, coords: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return random blocks at `coords`, zero outside the matrix."""
        bound = row_bounds(coords, self.grid, self.block_size[1], self.in_features)[coords[0].long()]
        limits = bound.to(self.weight.dtype).view(-1, 1, 1).expand(-1, *self.block_size)
        return uniform(limits, generator) * self._inside(coords)

    def _draw_pattern(self, generator: torch.Generator | None) -> None:
        """Draw a random pattern of as many blocks as `coords` has room for."""
        count = self.coords.shape[1]
        if count:
            density, allow_empty_rows = count / (self.grid[0] * self.grid[1]), self._allow_empty_rows
            mask = random_mask(self.grid, density, allow_empty_rows or count < self.grid[0], generator)
            self.coords = _listed(mask, self.coords.device)
        self._is_undrawn = False

    def _apply(self: Layer, fn: Any, recurse: bool = True) -> Layer:
        """Move the layer; its pattern is checked before, since a change could not be detected afterwards."""
        before = self.coords
        if self._settled is not None:
            self._settle()
        super()._apply(fn, recurse)
        after = self.coords
        if before.is_meta and not after.is_meta:
            self._is_undrawn = True
        if self._settled is not None and after is not before:
            self._settled = None
            is_read = type(after) is Tensor and not before.is_meta and not after.is_meta
            if is_read and torch.equal(before.to(after.device), after):
                self._settle()
        return self

    def _save_to_state_dict(self, *arguments: Any, **options: Any) -> None:
        """Save the tensors; refuse a pattern that was overwritten, which could not be detected after loading."""
        self._settle()
        super()._save_to_state_dict(*arguments, **options)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        """Load blocks with their pattern, or report why they do not fit; an equal pattern keeps its format."""
        tensors = {name: part for name, part in (*self._parameters.items(), *self._buffers.items()) if part is not None}
        problem = mismatch(state_dict, prefix, self, tensors)
        if problem:  # nothing is copied: values of one pattern would end up at the blocks of another
            lists[2].append(problem)
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        if f"{prefix}coords" in state_dict:
            self._is_undrawn, self._settled = False, None
            self._settle()
        cached, self._weight_format = self._weight_format, None
        if cached is not None and cached.has_pattern(self.coords):  # the next call may be a compiled one
            self._weight_format = make_weight_format(self.coords, self.weight, self.grid, cached)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy, without the format, which is made again."""
        settled = self._settled
        if settled is None or settled.tensors[0] is not self.coords:
            self._settle()  # a copy may be averaged before its first use
        return {**super().__getstate__(), "_weight_format": None}


def _listed(mask: Tensor, device: torch.device) -> Tensor:
    """Return the blocks of a mask row by row, as `coords` lists them."""
    with torch.inference_mode(False):  # inference tensors have no version counter, which guards the pattern
        return mask.nonzero().T.to(torch.int32).contiguous().to(device)
