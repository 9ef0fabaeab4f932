"""`SplitSpMM`: a sparse matrix whose rows are split over ranks, times a dense one whose rows are split likewise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..compiler import OperandError, ShapeError
from ..formats.sparse_format import SparseFormat
from ..formats.torch_state import wants_gradient
from ..functional import insum
from ..matmul.functional import sddmm
from ..matmul.layer import SpMM
from ..matmul.operands import as_format
from ..not_scripted import NotScripted
from .agreement import gathered_numbers, on_all_ranks, ranks_of
from .placed import arrived, check_whole_numbers, refuse_transforms

__all__ = ["SplitSpMM"]

FORWARD = "C[m,n] += A[m,k] * B[k,n]"
BACKWARD = "B[k,n] += A[m,k] * C[m,n]"


class SplitSpMM(NotScripted, nn.Module):
    """`C[m,n] += A[m,k] * B[k,n]`: each rank holds some rows of A, of B and of C.

    A rank's columns of A fall in two: those of its own rows of B, and those of rows that other ranks hold. Of the
    latter only the rows that occur travel, by one all-to-all, while the own columns are multiplied; `C +=` adds the
    rest. The gradient of B goes the same way back.

    All ranks make the layer, and call it, together. It has no parameters, buffers or state_dict: each rank has its own
    matrix, which wrappers for data parallelism would overwrite with the first rank's, or average. So `values`, if it is
    trained, is not among `parameters()`: pass it to the optimizer by its name. Its gradient is whole on the rank that
    has the entry. `whole_state_dict` saves it. `nodes` is what `from_graph` finds: this rank's rows of the graph.

    Args:
        A: this rank's rows of the matrix, [own rows of C, rows of B on all ranks], anything that `insum_ops.spmm`
            takes; the rows of B are numbered by rank, those of the first rank first.
        mesh: a mesh of one dimension, over the ranks.
        rows: how many rows of B this rank holds; None if as many as A has rows, as for a graph.
        trainable: whether the values of A, each rank's own, are trained: `values` [entries], row by row.

    Raises:
        ShapeError: on every rank, if A has another number of columns than all ranks have rows of B.
        OperandError: on every rank, if the mesh has several dimensions, A is nothing that holds a sparse matrix, or its
            dtype differs between ranks.

    Example:
        >>> import torch
        >>> from torch import distributed
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from insum_ops.distributed import SplitSpMM
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> layer = SplitSpMM(torch.tensor([[0.0, 5.0], [6.0, 7.0]]).to_sparse(), init_device_mesh("cpu", (1,)))
        >>> layer(torch.tensor([[1.0], [10.0]])).tolist(), layer.rows_received
        ([[50.0], [76.0]], 0)
        >>> distributed.destroy_process_group()
    """

    nodes: Tensor | None
    send: Tensor
    values: nn.Parameter | None
    _order: Tensor | None = None  # the nodes of a graph, by the ranks that have them

    def __init__(self, A: Any, mesh: DeviceMesh, rows: int | None = None, *, trainable: bool = False) -> None:
        super().__init__()
        with on_all_ranks(mesh) as all_ranks:
            if mesh.ndim != 1:
                raise OperandError(
                    f"mesh has {mesh.ndim} dimensions, says rank {dist.get_rank()}; pass one of them, as in "
                    "mesh['rows']"
                )
            form = as_format(A)
            if form.ndim != 2:
                raise ShapeError(f"A is {list(form.shape)} on rank {dist.get_rank()}; pass its rows as a matrix")
            if rows is not None and (not isinstance(rows, int) or rows < 0):
                raise OperandError(
                    f"rows is {rows!r} on rank {dist.get_rank()}; pass how many rows of B it holds, or leave it out"
                )
            all_ranks.equal("the dtype of A", str(form.dtype), "convert it on one of them with .to()")
            all_ranks.equal("trainable", repr(trainable), "train the values on all ranks, or on none")
        own = form.shape[0] if rows is None else rows
        entries = form.to_torch(torch.sparse_coo).coalesce()
        (m, k), values = entries.indices(), entries.values()
        sizes = gathered_numbers([own, form.shape[1], form.shape[0], len(m)], mesh)
        counts, widths, heights, self.entry_counts = (list(column) for column in zip(*sizes))
        wrong = [(rank, width) for rank, width in zip(ranks_of(mesh), widths) if width != sum(counts)]
        if wrong:
            raise ShapeError(
                f"A has {wrong[0][1]} columns on rank {wrong[0][0]}, but the ranks hold {counts} rows of B, "
                f"{sum(counts)} in all, says rank {dist.get_rank()}; give each rank its rows of A with a column for "
                f"every row of B"
            )
        self.mesh, at = mesh, mesh.get_local_rank()
        bounds = [sum(counts[:rank]) for rank in range(len(counts) + 1)]
        self.counts, self.start, self.rows = counts, sum(heights[:at]), own
        is_own = (k >= bounds[at]) & (k < bounds[at + 1])
        needed, place = k[~is_own].unique(return_inverse=True)  # sorted, so by the ranks that hold them
        cuts = torch.tensor(bounds, device=needed.device)
        self.receives = torch.searchsorted(needed, cuts).diff().tolist()
        self.sends = [own_counts[at] for own_counts in gathered_numbers(self.receives, mesh)]
        wanted = needed - cuts[:-1].repeat_interleave(torch.tensor(self.receives, device=needed.device))
        # no buffers and no modules of this one: each rank has others, which DDP would overwrite with the first rank's
        self.send, self.nodes = arrived(self._exchange(wanted, back=True)), None
        local = k.clone()
        local[is_own] -= bounds[at]
        local[~is_own] = place
        self._entries, self._columns, self._is_own = torch.stack([m, local]), k, is_own
        self._shapes = (form.shape[0], own), (form.shape[0], len(needed))
        # a Parameter is set past nn.Module, which would list it
        vars(self)["values"] = nn.Parameter(values.detach().clone()) if trainable else None
        # the values of trained parts are the numbers of their entries, from 1
        self._parts = self._made(torch.arange(1, len(m) + 1, device=m.device).double() if trainable else values)

    def _made(self, values: Tensor) -> tuple[SpMM, SpMM]:
        """Return the columns that meet own rows of B, and those that meet other ranks', with values for each entry."""
        own, remote = (
            SpMM(_matrix(self._entries[0, part], self._entries[1, part], values[part], shape))
            for part, shape in zip((self._is_own, ~self._is_own), self._shapes)
        )
        return own, remote

    @classmethod
    def from_graph(cls, A: Any, owner: Tensor, mesh: DeviceMesh, *, trainable: bool = False) -> SplitSpMM:
        """Return the layer of a square matrix that every rank has, of which it keeps its own rows.

        Args:
            A: the matrix [nodes, nodes], anything that `insum_ops.spmm` takes, the same on every rank.
            owner: the rank of each node within the mesh, [nodes], the same on every rank.
            mesh: a mesh of one dimension, over the ranks.
            trainable: whether the values of A are trained, as for the layer.

        Returns:
            A `SplitSpMM`. Its `nodes` are the nodes of this rank, so that `X[layer.nodes]` are its rows of X.

        Raises:
            OperandError: on every rank, if A or `owner` is not the same on all of them, or `owner` names a rank that is
                not there, or holds no whole numbers.
            ShapeError: on every rank, if A is not square, or `owner` has another length; otherwise as the layer.

        Example:
            >>> import torch
            >>> from torch import distributed
            >>> from torch.distributed.device_mesh import init_device_mesh
            >>> from insum_ops.distributed import SplitSpMM
            >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
            >>> A = torch.eye(3).to_sparse()
            >>> SplitSpMM.from_graph(A, torch.zeros(3, dtype=torch.int64), init_device_mesh("cpu", (1,))).nodes
            tensor([0, 1, 2])
            >>> distributed.destroy_process_group()
        """
        rank = dist.get_rank()
        with on_all_ranks(mesh) as ranks:
            form = as_format(A)
            check_whole_numbers("owner", owner)
            if form.ndim != 2 or form.shape[0] != form.shape[1] or owner.shape != (form.shape[0],):
                raise ShapeError(
                    f"A is {list(form.shape)} and owner {list(owner.shape)} on rank {rank}; pass a square matrix, and "
                    "a rank for each of its rows"
                )
            if len(owner) and not 0 <= int(owner.min()) <= int(owner.max()) < mesh.size():
                raise OperandError(
                    f"owner names ranks {int(owner.min())} to {int(owner.max())}, but the mesh has ranks 0 to "
                    f"{mesh.size() - 1}, says rank {rank}; number them within the mesh"
                )
            ranks.equal("owner", owner, "compute it on one rank and broadcast it")
            entries = form.to_torch(torch.sparse_coo).coalesce()
            ranks.equal("A's pattern", entries.indices(), "pass the same graph on every rank")
            ranks.equal("A's list of values", entries.values().detach(), "pass the same graph on every rank")
        order = owner.argsort(stable=True)  # by rank
        number = torch.empty_like(order)
        number[order] = torch.arange(len(order), device=order.device)
        nodes = (owner == mesh.get_local_rank()).nonzero().flatten()
        (m, k), values = entries.indices(), entries.values()
        is_own = owner[m] == mesh.get_local_rank()
        first = number[nodes[0]] if len(nodes) else 0
        shape = (len(nodes), len(owner))
        own = _matrix(number[m[is_own]] - first, number[k[is_own]], values[is_own], shape)
        layer = cls(own, mesh, trainable=trainable)
        layer.nodes, layer._order = nodes, order
        return layer

    def forward(self, B: Tensor) -> Tensor:
        """Multiply the rows of A by a dense matrix of which each rank passes its rows.

        Args:
            B: this rank's rows [rows, N]; N is the same on all ranks.

        Returns:
            This rank's rows of C, [own rows of A, N].

        Raises:
            ShapeError: on every rank, if B is no matrix on one of them, or has another number of rows.
            OperandError: on every rank, if B is a DTensor or on another device than A, or its width or dtype differs
                between ranks.

        Example:
            >>> import torch
            >>> from torch import distributed
            >>> from torch.distributed.device_mesh import init_device_mesh
            >>> from insum_ops.distributed import SplitSpMM
            >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
            >>> layer = SplitSpMM(2 * torch.eye(2).to_sparse(), init_device_mesh("cpu", (1,)))
            >>> layer(torch.ones(2, 1)).tolist()
            [[2.0], [2.0]]
            >>> distributed.destroy_process_group()
        """
        rank = dist.get_rank()
        refuse_transforms("SplitSpMM")
        with on_all_ranks(self.mesh, is_call=True) as ranks:
            if not isinstance(B, Tensor) or isinstance(B, DTensor):
                remedy = "B.to_local(), " if isinstance(B, DTensor) else ""
                kind = type(B).__name__
                raise OperandError(f"B is of type {kind} on rank {rank}; pass {remedy}a tensor [{self.rows}, N]")
            if B.ndim != 2 or B.shape[0] != self.rows:
                raise ShapeError(
                    f"B is {list(B.shape)} on rank {rank}, which holds {self.rows} of its rows; pass [{self.rows}, N]"
                )
            if B.device != self.send.device:
                raise OperandError(
                    f"B is on {B.device} but A on {self.send.device}, says rank {rank}; move one with .to()"
                )
            trained = " with a gradient" if wants_gradient([B]) else ""
            kind = f"{B.shape[1]} columns of {B.dtype}{trained}"
            ranks.equal("B", kind, "pass rows of one width and dtype on every rank")
            is_trained = self.values is not None and wants_gradient([self.values])
            ranks.equal("values", f"{'' if is_trained else 'not '}trained", "train them on all ranks, or on none")
        return _Product.apply(B, self.values, self, False)  # type: ignore[no-any-return]

    @property
    def own(self) -> SpMM:
        """Return the columns of A that meet this rank's rows of B, as a layer."""
        return self._parts[0]

    @property
    def remote(self) -> SpMM:
        """Return the columns of A that meet rows of other ranks, as a layer: one for each row that is received."""
        return self._parts[1]

    @property
    def rows_received(self) -> int:
        """Return how many rows of B come from other ranks at each call."""
        return sum(self.receives)

    @property
    def rows_sent(self) -> int:
        """Return how many rows of B go to other ranks at each call: a row counts once for each rank that needs it."""
        return sum(self.sends)

    def extra_repr(self) -> str:
        """Return what `repr` shows between the parentheses."""
        rank, ranks = self.mesh.get_local_rank(), self.mesh.size()
        return f"{FORWARD}, rank {rank} of {ranks}, {self.rows} rows, {self.rows_received} received"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or convert what the layer holds, as torch does with parameters and buffers."""
        super()._apply(fn, recurse)
        device = self.send.device
        self.send, self._columns = fn(self.send), fn(self._columns)
        self._entries, self._is_own = fn(self._entries), fn(self._is_own)
        self.nodes, self._order = (None if part is None else fn(part) for part in (self.nodes, self._order))
        if self.values is None:
            for part in self._parts:
                part._apply(fn, recurse)
            return self
        self.values.data = fn(self.values.data)
        if self.send.device != device:  # the numbers of entries are never rounded
            self._parts = self._made(torch.arange(1, len(self.values) + 1, device=self.send.device).double())
        return self

    def _exchange(self, rows: Tensor, back: bool) -> Tensor:
        """Start to send rows to the ranks that need them; `back`: from those ranks to the ones that hold them."""
        sends, receives = (self.receives, self.sends) if back else (self.sends, self.receives)
        return all_to_all_single(rows.contiguous(), receives, sends, (self.mesh, 0))

    def _forms(self, values: Tensor | None) -> tuple[SparseFormat, SparseFormat]:
        """Return both parts of A with these values of its entries; None: they are not trained."""
        own, remote = (part.A for part in self._parts)
        return (own, remote) if values is None else (_with_entries(own, values), _with_entries(remote, values))

    def _received(self, B: Tensor) -> Tensor:
        """Start to send rows of B to the ranks that need them, and return those that this one needs."""
        return self._exchange(B.index_select(0, self.send), back=False)

    def _multiply(self, B: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of C, and the rows of B that it received."""
        remote = self._received(B)
        own_part, remote_part = self._forms(values)
        C = insum(FORWARD, A=own_part, B=B)  # while rows travel
        remote = arrived(remote)  # on every rank, also where none comes
        return insum(FORWARD, A=remote_part, B=remote, C=C) if self.rows_received else C, remote

    def _multiply_transposed(self, C: Tensor, values: Tensor | None) -> Tensor:
        own_part, remote_part = self._forms(values)
        remote = C.new_zeros(0, C.shape[1])
        if self.rows_received:
            remote = insum(BACKWARD, A=remote_part, C=C)
        travelling = self._exchange(remote, back=True)
        B = insum(BACKWARD, A=own_part, C=C)  # while sums travel
        return B.index_add(0, self.send, arrived(travelling))

    def _sample(self, C: Tensor, B: Tensor, remote: Tensor | None) -> Tensor:
        """Return the product of C's and B's rows at each entry of A; `remote`: rows of B that have come already."""
        travelling = self._received(B) if remote is None else remote
        sampled = C.new_zeros(len(self._columns), dtype=torch.promote_types(C.dtype, B.dtype))
        for part, rows in zip(self._parts, (B, travelling)):
            form = part.A.with_values(part.A.values.to(C.dtype))
            place, is_entry = _numbers(part.A)
            if is_entry.any():
                sampled[place[is_entry]] = sddmm(form, C, arrived(rows)).values[is_entry].to(sampled.dtype)
        arrived(travelling)
        return sampled

    @property
    def graph_entries(self) -> Tensor:
        """This rank's entries [2, entries] by their rows and columns in the graph, or in the order of ranks."""
        rows, columns = self._entries[0] + self.start, self._columns
        return torch.stack([rows, columns] if self._order is None else [self._order[rows], self._order[columns]])


def _matrix(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    coords = torch.stack([rows, columns])
    return torch.sparse_coo_tensor(coords, values, shape, device=values.device, check_invariants=True)


def _numbers(form: SparseFormat) -> tuple[Tensor, Tensor]:
    """Return which entry each value of a trained part is, and which values are entries at all."""
    (rows, columns), numbers = form.coords, form.values.long() - 1
    is_entry = torch.ones_like(numbers, dtype=torch.bool)
    for coord in (rows, columns):  # padding has a position of -1, and any value
        if coord is not None:
            is_entry &= (coord >= 0).view(*coord.shape, *[1] * (numbers.ndim - coord.ndim))
    return numbers, is_entry


def _with_entries(form: SparseFormat, values: Tensor) -> SparseFormat:
    """Return a trained part with the values of its entries in their places."""
    place, is_entry = _numbers(form)
    return form.with_values(torch.where(is_entry, values.take(place * is_entry), 0)) if len(values) else form


class _Product(torch.autograd.Function):
    """The product with A or its transpose; the gradient of each is the other, and that of A's values a `_Sampled`."""

    @staticmethod
    def forward(ctx: Any, B: Tensor, values: Tensor | None, layer: SplitSpMM, is_transposed: bool) -> Tensor:
        ctx.layer, ctx.is_transposed = layer, is_transposed
        is_trained = values is not None and ctx.needs_input_grad[1]
        remote = None
        if is_transposed:
            result = layer._multiply_transposed(B, values)
        else:
            result, remote = layer._multiply(B, values)
        ctx.save_for_backward(B if is_trained else None, values, remote if is_trained else None)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        B, values, remote = ctx.saved_tensors
        grad, sampled = None, None
        if ctx.needs_input_grad[0]:
            grad = _Product.apply(grad_output, values, ctx.layer, not ctx.is_transposed)
        if ctx.needs_input_grad[1]:
            C, B = (B, grad_output) if ctx.is_transposed else (grad_output, B)
            sampled = _Sampled.apply(C, B, ctx.layer, remote)
        return grad, sampled, None, None


class _Sampled(torch.autograd.Function):
    """V[m,k] = C[m,n] * B[k,n] where A has an entry: the gradient of A's values, linear in C and in B."""

    @staticmethod
    def forward(ctx: Any, C: Tensor, B: Tensor, layer: SplitSpMM, remote: Tensor | None) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(C, B)
        return layer._sample(C, B, remote)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        C, B = ctx.saved_tensors
        grad_C = _Product.apply(B, grad_output, ctx.layer, False) if ctx.needs_input_grad[0] else None
        grad_B = _Product.apply(C, grad_output, ctx.layer, True) if ctx.needs_input_grad[1] else None
        return grad_C, grad_B, None, None
