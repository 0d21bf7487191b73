"""Attention of each sample's target over its history, whose keys and values are computed once per id that is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec.sparse.jagged_tensor import JaggedTensor

from flexshard.embeddings.dedup.modules import Shared, as_runs
from flexshard.errors import DataError

__all__ = ["TargetAttention", "run_attention"]

_TILES = (1, 2, 4, 8, 16, 32, 64)
_GATHER = 8  # queries whose products with a key take as long as to fetch it and its value (measured: 2 to 16)


class TargetAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` of one query per sample, its target, over the sample's history.

    Parameters, their names and their initialisation are those of ``nn.MultiheadAttention``. Keys and values are those
    of the history's buffer; samples whose lists lie next to each other in it are multiplied as one matrix.
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, **options: Any) -> None:
        """As ``nn.MultiheadAttention``; dropout draws for each sample by itself.

        Args:
            embed_dim, num_heads, dropout, bias: as there.
            options: ``device`` and ``dtype``.

        Raises:
            DataError: another option of ``nn.MultiheadAttention``, which it has not.
        """
        other = next((name for name in options if name not in ("device", "dtype")), None)
        if other is not None:
            raise DataError(f"TargetAttention has no {other!r}; wrap nn.MultiheadAttention in DedupedPerSample for it")
        super().__init__(embed_dim, num_heads, dropout, bias, batch_first=True, **options)

    def forward(self, target: Tensor, history: Shared | JaggedTensor) -> Tensor:
        """What the target of each sample finds; shape (B, embed_dim).

        Of an empty history, what the output projection makes of zeros (``nn.MultiheadAttention`` gives nan).

        Args:
            target: a vector per sample; shape (B, embed_dim).
            history: lists of vectors, deduplicated or plain.

        Raises:
            DataError: another number of targets than of lists, or a history that is neither.
        """
        values, starts, lengths = _runs(history)
        if target.shape[:1] != lengths.shape:
            raise DataError(f"target has shape {tuple(target.shape)} for {lengths.numel()} samples' histories")
        dim, heads = self.embed_dim, self.num_heads
        query_weight, rest = self.in_proj_weight.split([dim, 2 * dim])
        query_bias, rest_bias = (None, None) if self.in_proj_bias is None else self.in_proj_bias.split([dim, 2 * dim])
        query = functional.linear(target, query_weight, query_bias).view(-1, heads, dim // heads)
        both = functional.linear(values, rest, rest_bias).view(-1, 2, heads, dim // heads)
        dropout = self.dropout if self.training else 0.0
        found = run_attention(query, both, starts, lengths, dropout=dropout)
        return self.out_proj(found.reshape(-1, dim))


def run_attention(
    query: Tensor, keys_and_values: Tensor, starts: Tensor, lengths: Tensor, *, dropout: float = 0.0
) -> Tensor:
    """Attention of a query per sample over its run of a buffer.

    Args:
        query: shape (B, H, d).
        keys_and_values: of the buffer; shape (N, 2, H, d).
        starts, lengths: of each sample's run; shapes (B,).
        dropout: chance that a weight is dropped.

    Returns:
        shape (B, H, d); zeros of empty runs.
    """
    samples, size = query.shape[0], keys_and_values.shape[0]
    if not samples or not size:
        return query * 0.0 + keys_and_values.sum() * 0.0
    order = torch.argsort(starts, stable=True)
    begins, ends = starts[order].long(), (starts + lengths)[order].long()
    tile, span = _tile(begins, ends)
    extra = -samples % tile
    # Samples that fill up the last tile have nothing, at the place of its last one.
    begins = torch.cat([begins, begins[-1:].expand(extra)]).view(-1, tile)
    ends = torch.cat([ends, begins.new_zeros(extra)]).view(-1, tile)
    places = begins[:, :1] + torch.arange(span, device=starts.device)
    inside = ((places[:, None] >= begins[..., None]) & (places[:, None] < ends[..., None]))[:, None]
    is_empty = ~inside.any(-1, keepdim=True)
    keys, values = (
        keys_and_values.index_select(0, places.clamp(max=size - 1).reshape(-1))
        .view(*places.shape, *keys_and_values.shape[1:])
        .permute(2, 0, 3, 1, 4)
    )
    asked = functional.pad(query.index_select(0, order), (0, 0, 0, 0, 0, extra))
    asked = asked.view(-1, tile, *query.shape[1:]).transpose(1, 2)
    found = functional.scaled_dot_product_attention(asked, keys, values, attn_mask=inside | is_empty, dropout_p=dropout)
    found = found.masked_fill(is_empty, 0.0).transpose(1, 2).reshape(-1, *query.shape[1:])[:samples]
    return found.index_select(0, torch.argsort(order))


def _runs(history: Shared | JaggedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """A buffer of vectors, and each sample's run of it."""
    if not isinstance(history, Shared | JaggedTensor):
        raise DataError(f"a history is deduplicated lists of vectors or a JaggedTensor, found {type(history).__name__}")
    found = as_runs(history)
    return found.values, found.starts, found.lengths


def _tile(begins: Tensor, ends: Tensor) -> tuple[int, int]:
    """How many samples in order of their runs are best multiplied together, and the longest stretch of any such tile.

    A device waits for it.
    """
    begins, ends = begins.cpu(), ends.cpu()
    best = (float("inf"), 1, 1)
    for tile in _TILES:
        extra = -begins.numel() % tile
        first = torch.cat([begins, begins[-1:].expand(extra)]).view(-1, tile)[:, 0]
        last = torch.cat([ends, ends.new_zeros(extra)]).view(-1, tile).amax(1)
        span = max(1, int((last - first).max()))
        best = min(best, (first.numel() * span * (_GATHER + tile), tile, span))
    return best[1:]
