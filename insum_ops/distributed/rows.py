"""`SplitSpMM`: a sparse matrix whose rows are split over ranks, times a dense one whose rows are split likewise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_to_all_single
from torch.distributed.device_mesh import DeviceMesh

from ..compiler import OperandError, ShapeError
from ..functional import insum
from ..matmul.layer import SpMM
from ..matmul.operands import as_format
from ..not_scripted import NotScripted
from .agreement import check_equal, gathered_numbers, ranks_of

__all__ = ["SplitSpMM"]

FORWARD = "C[m,n] += A[m,k] * B[k,n]"
BACKWARD = "B[k,n] += A[m,k] * C[m,n]"


class SplitSpMM(NotScripted, nn.Module):
    """`C[m,n] += A[m,k] * B[k,n]`: each rank holds some rows of A, of B and of C.

    A rank's columns of A fall in two: those of its own rows of B, and those of rows that other ranks hold. Of the
    latter only the rows that occur travel, by one all-to-all, while the own columns are multiplied; `C +=` adds the
    rest. The gradient of B goes the same way back. A itself is not trained.

    All ranks make the layer, and call it, together. It has no parameters, buffers or state_dict: the matrix is data, of
    which each rank has its own. `nodes` is what `from_graph` finds: this rank's rows of the graph.

    Args:
        A: this rank's rows of the matrix, [own rows of C, rows of B on all ranks], anything that `insum_ops.spmm`
            takes; the rows of B are numbered by rank, those of the first rank first.
        mesh: a mesh of one dimension, over the ranks.
        rows: how many rows of B this rank holds; None if as many as A has rows, as for a graph.

    Raises:
        ShapeError: A has another number of columns than all ranks have rows of B; every rank says which ranks have
            how many.
        OperandError: the mesh has several dimensions, or A is nothing that holds a sparse matrix.

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

    def __init__(self, A: Any, mesh: DeviceMesh, rows: int | None = None) -> None:
        super().__init__()
        if mesh.ndim != 1:
            raise OperandError(
                f"mesh has {mesh.ndim} dimensions, says rank {dist.get_rank()}; pass one of them, as in mesh['rows']"
            )
        form = as_format(A)
        if form.ndim != 2:
            raise ShapeError(f"A is {list(form.shape)} on rank {dist.get_rank()}; pass its rows as a matrix")
        self.mesh, ranks = mesh, ranks_of(mesh)
        own = form.shape[0] if rows is None else rows
        sizes = gathered_numbers([own, form.shape[1]], mesh)
        counts = [count for count, _ in sizes]
        wrong = [(rank, width) for rank, (_, width) in zip(ranks, sizes) if width != sum(counts)]
        if wrong:
            raise ShapeError(
                f"A has {wrong[0][1]} columns on rank {wrong[0][0]}, but the ranks hold {counts} rows of B, "
                f"{sum(counts)} in all, says rank {dist.get_rank()}; give each rank its rows of A with a column for "
                f"every row of B"
            )
        at = mesh.get_local_rank()
        bounds = [sum(counts[:rank]) for rank in range(len(counts) + 1)]
        self.counts, self.start, self.rows = counts, bounds[at], own
        entries = form.to_torch(torch.sparse_coo).coalesce()
        (m, k), values = entries.indices(), entries.values()
        is_own = (k >= bounds[at]) & (k < bounds[at + 1])
        needed, place = k[~is_own].unique(return_inverse=True)  # sorted, so by the ranks that hold them
        cuts = torch.tensor(bounds, device=needed.device)
        self.receives = torch.searchsorted(needed, cuts).diff().tolist()
        self.sends = [own_counts[at] for own_counts in gathered_numbers(self.receives, mesh)]
        wanted = needed - cuts[:-1].repeat_interleave(torch.tensor(self.receives, device=needed.device))
        # no buffers and no modules of this one: each rank has others, which DDP would overwrite with the first rank's
        self.send, self.nodes = _arrived(self._exchange(wanted, back=True)), None
        self._parts = (
            SpMM(_matrix(m[is_own], k[is_own] - bounds[at], values[is_own], (form.shape[0], own))),
            SpMM(_matrix(m[~is_own], place, values[~is_own], (form.shape[0], len(needed)))),
        )

    @classmethod
    def from_graph(cls, A: Any, owner: Tensor, mesh: DeviceMesh) -> SplitSpMM:
        """Return the layer of a square matrix that every rank has, of which it keeps its own rows.

        Args:
            A: the matrix [nodes, nodes], anything that `insum_ops.spmm` takes, the same on every rank.
            owner: the rank of each node within the mesh, [nodes], the same on every rank.
            mesh: a mesh of one dimension, over the ranks.

        Returns:
            A `SplitSpMM`. Its `nodes` are the nodes of this rank, so that `X[layer.nodes]` are its rows of X.

        Raises:
            OperandError: `owner` is not the same on all ranks, or names a rank that is not there.
            ShapeError: A is not square, or `owner` has another length; otherwise as the layer.

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
        form = as_format(A)
        if form.ndim != 2 or form.shape[0] != form.shape[1] or owner.shape != (form.shape[0],):
            raise ShapeError(
                f"A is {list(form.shape)} and owner {list(owner.shape)} on rank {dist.get_rank()}; pass a square "
                "matrix, and a rank for each of its rows"
            )
        check_equal({"owner": owner}, mesh, "compute it on one rank and broadcast it")
        if len(owner) and not 0 <= int(owner.min()) <= int(owner.max()) < mesh.size():
            raise OperandError(
                f"owner names ranks {int(owner.min())} to {int(owner.max())}, but the mesh has ranks 0 to "
                f"{mesh.size() - 1}, says rank {dist.get_rank()}; number them within the mesh"
            )
        order = owner.argsort(stable=True)  # by rank
        number = torch.empty_like(order)
        number[order] = torch.arange(len(order), device=order.device)
        nodes = (owner == mesh.get_local_rank()).nonzero().flatten()
        entries = form.to_torch(torch.sparse_coo).coalesce()
        (m, k), values = entries.indices(), entries.values()
        is_own = owner[m] == mesh.get_local_rank()
        first = number[nodes[0]] if len(nodes) else 0
        shape = (len(nodes), len(owner))
        layer = cls(_matrix(number[m[is_own]] - first, number[k[is_own]], values[is_own], shape), mesh)
        layer.nodes = nodes
        return layer

    def forward(self, B: Tensor) -> Tensor:
        """Multiply the rows of A by a dense matrix of which each rank passes its rows.

        Args:
            B: this rank's rows [rows, N]; N is the same on all ranks.

        Returns:
            This rank's rows of C, [own rows of A, N].

        Raises:
            ShapeError: B is no matrix, or has another number of rows.
            OperandError: B is of another dtype or device than A.

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
        if B.ndim != 2 or B.shape[0] != self.rows:
            raise ShapeError(
                f"B is {list(B.shape)} on rank {dist.get_rank()}, which holds {self.rows} of its rows; pass "
                f"[{self.rows}, N]"
            )
        return _Product.apply(B, self, False)  # type: ignore[no-any-return]

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
        for part in self._parts:
            part._apply(fn, recurse)
        self.send = fn(self.send)
        self.nodes = None if self.nodes is None else fn(self.nodes)
        return self

    def _exchange(self, rows: Tensor, back: bool) -> Tensor:
        """Start to send rows to the ranks that need them; `back`: from those ranks to the ones that hold them."""
        sends, receives = (self.receives, self.sends) if back else (self.sends, self.receives)
        return all_to_all_single(rows.contiguous(), receives, sends, (self.mesh, 0))

    def _multiply(self, B: Tensor) -> Tensor:
        remote = self._exchange(B.index_select(0, self.send), back=False)
        C = insum(FORWARD, A=self.own.A, B=B)  # while rows travel
        remote = _arrived(remote)  # on every rank, also where none comes
        return insum(FORWARD, A=self.remote.A, B=remote, C=C) if self.rows_received else C

    def _multiply_transposed(self, C: Tensor) -> Tensor:
        remote = C.new_zeros(0, C.shape[1])
        if self.rows_received:
            remote = insum(BACKWARD, A=self.remote.A, C=C)
        travelling = self._exchange(remote, back=True)
        B = insum(BACKWARD, A=self.own.A, C=C)  # while sums travel
        return B.index_add(0, self.send, _arrived(travelling))


def _matrix(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.sparse_coo_tensor(torch.stack([rows, columns]), values, shape, check_invariants=True)


def _arrived(rows: Tensor) -> Tensor:
    """Return what an exchange brings, once it is there."""
    return rows.wait() if isinstance(rows, AsyncCollectiveTensor) else rows


class _Product(torch.autograd.Function):
    """The product with A or its transpose; the gradient of each is the other."""

    @staticmethod
    def forward(ctx: Any, B: Tensor, layer: SplitSpMM, is_transposed: bool) -> Tensor:
        ctx.layer, ctx.is_transposed = layer, is_transposed
        return layer._multiply_transposed(B) if is_transposed else layer._multiply(B)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return _Product.apply(grad_output, ctx.layer, not ctx.is_transposed), None, None
