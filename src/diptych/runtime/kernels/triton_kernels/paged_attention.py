"""Causal attention over a paged KV cache for sequences of any number of new tokens, decodes and prompt chunks alike.

A program computes a tile of ROWS rows: neighbouring queries of one sequence times the query heads that share one KV
head. Keys are read in tiles of TILE tokens at absolute multiples of TILE, and summed up by an online softmax within
splits of SPLIT tokens at absolute multiples of SPLIT; the splits of a row are then merged in their order. One program
does all splits of its tile where there are enough tiles, else each split has a program of its own and ``_merge_splits``
follows: the sums and their order are the same, and so are the bits. A key tile that a row does not see changes nothing
in it: its weights are zeros, and its rescaling factors are ones. Keys before the windows of all rows of a tile are not
read: their blocks may belong to another sequence by now.

K and V lie as [num_blocks, block_size, num_kv_heads, head_dim].
"""

import torch
import triton
import triton.language as tl

ROWS = 64  # the fewest rows that all tensor cores from Hopper on multiply by one kind of instruction
TILE = 64  # keys
SPLIT = 256  # keys
LOG2_E = tl.constexpr(1.4426950408889634)
WANTED_PROGRAMS = 256  # about two for each multiprocessor of a large GPU


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    max_query_len: int,
    max_context_len: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with q [num_tokens, num_heads, head_dim] over each sequence's blocks. Returns [num_tokens, num_heads *
    head_dim], contiguous.

    query_start [num_seqs + 1], context_lens [num_seqs] and block_tables [num_seqs, max_blocks]: int32, as in
    InputBatch. A sequence's queries are its last tokens; a query sees itself and what is before it, of that ``window``
    tokens (None: all). max_query_len, max_context_len: bounds of all sequences; they choose the grid, not the result.
    sinks: [num_heads] fp32, see LayerAttention (None: there are none).
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    queries = max(1, ROWS // group)  # of a tile
    if group > ROWS:
        raise ValueError(f"{group} query heads share a KV head; at most {ROWS} can")
    num_seqs = context_lens.shape[0]
    is_decode = max_query_len == 1
    num_tiles = num_seqs if is_decode else num_tokens // queries + num_seqs
    num_splits = triton.cdiv(max_context_len, SPLIT)
    is_split = num_splits > 1 and num_tiles * num_kv_heads < WANTED_PROGRAMS
    out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype, device=q.device)
    dim = triton.next_power_of_2(head_dim)
    shapes = {
        "HEAD_DIM": head_dim, "DIM": dim, "GROUP": group, "QUERIES": queries, "ROWS_": ROWS, "IS_DECODE": is_decode,
        "WINDOW": window or 0, "SPLIT_": SPLIT, "HAS_SINKS": sinks is not None,
    }  # fmt: skip
    sums = stats = out  # never touched where a program does all splits
    shares = out if sinks is None else sinks  # never touched without sinks
    if is_split:
        place = (num_tiles, num_kv_heads, num_splits, ROWS)
        sums = torch.empty(*place, dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(*place, 2, dtype=torch.float32, device=q.device)
    arrays = (query_start, context_lens, block_tables)
    _attend[(num_tiles, num_kv_heads, num_splits if is_split else 1)](
        q, k_cache, v_cache, out, sums, stats, shares, *arrays, num_seqs, num_splits, scale, softcap or 0.0,
        q.stride(0), block_tables.stride(0), BLOCK_SIZE=k_cache.shape[1], TILE_=TILE, HAS_SOFTCAP=softcap is not None,
        IS_SPLIT=is_split, IEEE=q.dtype == torch.float32, **shapes, num_warps=4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    if is_split:
        _merge_splits[(num_tiles, num_kv_heads)](
            out, sums, stats, shares, query_start, context_lens, num_seqs, num_splits, **shapes, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _sequence_of(tile, query_start, num_seqs, QUERIES: tl.constexpr, IS_DECODE: tl.constexpr):
    """(sequence, tile within it). Sequence i has the tiles from query_start[i] // QUERIES + i: at least as many as it
    needs, found without asking the host."""
    if IS_DECODE:
        return tile, tl.full([], 0, tl.int32)
    low = tl.full([], 0, tl.int32)
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tile - (tl.load(query_start + low) // QUERIES + low)


@triton.jit
def _rows_of(
    tile, kv_head, query_start, context_lens, num_seqs, QUERIES: tl.constexpr, GROUP: tl.constexpr,
    ROWS_: tl.constexpr, IS_DECODE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The tile's sequence, and by row: row of q, query head, position, whether there is such a row; then the keys
    [first, end) that any row sees."""
    sequence, tile_of_sequence = _sequence_of(tile, query_start, num_seqs, QUERIES, IS_DECODE)
    start = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - start
    before = tl.load(context_lens + sequence) - num_queries
    row = tl.arange(0, ROWS_)
    query = tile_of_sequence * QUERIES + row // GROUP
    is_row = (row < QUERIES * GROUP) & (query < num_queries)
    first_query = tile_of_sequence * QUERIES
    end = before + tl.minimum(first_query + QUERIES, num_queries)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, before + first_query - WINDOW + 1)
    if first_query >= num_queries:
        end = 0  # a tile that its sequence does not need
    return sequence, start + query, kv_head * GROUP + row % GROUP, before + query, is_row, first, end


@triton.jit
def _merge(peak, total, sums, other_peak, other_total, other_sums):
    """Two parts of a softmax as one: peaks and totals [rows], sums [rows, dim]. Exact where one of them is empty."""
    new_peak = tl.maximum(peak, other_peak)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight, other_weight = tl.exp2(peak - base), tl.exp2(other_peak - base)
    new_total = total * weight + other_total * other_weight
    return new_peak, new_total, sums * weight[:, None] + other_sums * other_weight[:, None]


@triton.jit
def _scores(
    queries, keys, key, is_key, position, scale, softcap, HAS_SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    IEEE: tl.constexpr,
):  # fmt: skip
    """Scores of a key tile, as powers of two; minus infinity where a row does not see a key."""
    if IEEE:
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
    else:
        scores = tl.dot(queries, keys) * scale
    if HAS_SOFTCAP:  # tanh(x) = (1 - e**-2x) / (1 + e**-2x) for x >= 0: never overflows
        small = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / softcap))
        capped = softcap * (1.0 - small) / (1.0 + small)
        scores = tl.where(scores < 0, -capped, capped)
    is_seen = (key[None, :] <= position[:, None]) & is_key[None, :]
    if WINDOW > 0:
        is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
    return tl.where(is_seen, scores * LOG2_E, float("-inf"))


@triton.jit
def _attend(
    q, k_cache, v_cache, out, split_sums, split_stats, sinks, query_start, context_lens, block_tables, num_seqs,
    num_splits, scale, softcap, q_stride, table_stride, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, ROWS_: tl.constexpr, IS_DECODE: tl.constexpr, WINDOW: tl.constexpr, SPLIT_: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_SPLIT: tl.constexpr,
    IEEE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, q_row, head, position, is_row, first, end = _rows_of(
        tile, kv_head, query_start, context_lens, num_seqs, QUERIES, GROUP, ROWS_, IS_DECODE, WINDOW
    )
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    places = q_row[:, None].to(tl.int64) * q_stride + head[:, None] * HEAD_DIM + dim[None, :]
    mask = is_row[:, None] & is_dim[None, :]
    queries = tl.load(q + places, mask=mask, other=0.0)
    table = block_tables + sequence.to(tl.int64) * table_stride
    kv_stride = tl.num_programs(1) * HEAD_DIM  # from one token to the next
    peak = tl.full([ROWS_], float("-inf"), tl.float32)
    total = tl.zeros([ROWS_], tl.float32)
    sums = tl.zeros([ROWS_, DIM], tl.float32)
    first_split, last_split = first // SPLIT_, (end + SPLIT_ - 1) // SPLIT_
    if IS_SPLIT:
        split = tl.program_id(2)
        first_split, last_split = tl.maximum(first_split, split), tl.minimum(last_split, split + 1)
    for split in range(first_split, last_split):
        low = tl.maximum(split * SPLIT_, first // TILE_ * TILE_)
        high = tl.minimum(split * SPLIT_ + SPLIT_, end)
        part_peak = tl.full([ROWS_], float("-inf"), tl.float32)
        part_total = tl.zeros([ROWS_], tl.float32)
        part_sums = tl.zeros([ROWS_, DIM], tl.float32)
        for begin in range(low, high, TILE_):
            key = begin + tl.arange(0, TILE_)
            is_key = (key >= first) & (key < end)
            block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            slot = (block * BLOCK_SIZE + key % BLOCK_SIZE) * kv_stride + kv_head * HEAD_DIM
            keys = tl.load(k_cache + slot[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
            scores = _scores(queries, keys, key, is_key, position, scale, softcap, HAS_SOFTCAP, WINDOW, IEEE)
            new_peak = tl.maximum(part_peak, tl.max(scores, 1))
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - base[:, None])
            rescale = tl.exp2(part_peak - base)
            values = tl.load(v_cache + slot[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
            part_total = part_total * rescale + tl.sum(weights, 1)
            if IEEE:
                products = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            else:
                products = tl.dot(weights.to(values.dtype), values)
            part_sums = part_sums * rescale[:, None] + products
            part_peak = new_peak
        peak, total, sums = _merge(peak, total, sums, part_peak, part_total, part_sums)
    if IS_SPLIT:
        place = (tile.to(tl.int64) * tl.num_programs(1) + kv_head) * num_splits + tl.program_id(2)
        at = place * ROWS_ + tl.arange(0, ROWS_)
        tl.store(split_stats + at * 2, peak)
        tl.store(split_stats + at * 2 + 1, total)
        tl.store(split_sums + at[:, None] * DIM + dim[None, :], sums)
    else:
        _store_rows(out, sums, peak, total, sinks, q_row, head, mask, dim, GROUP, HEAD_DIM, HAS_SINKS)


@triton.jit
def _store_rows(
    out, sums, peak, total, sinks, q_row, head, mask, dim, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    out_stride = tl.num_programs(1) * GROUP * HEAD_DIM
    places = q_row[:, None].to(tl.int64) * out_stride + head[:, None] * HEAD_DIM + dim[None, :]
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        high = tl.maximum(peak, sink)
        keep = tl.exp2(peak - high)
        total = total * keep + tl.exp2(sink - high)
        sums = sums * keep[:, None]
    safe = tl.where(total == 0.0, 1.0, total)  # rows that are not there
    tl.store(out + places, (sums / safe[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _merge_splits(
    out, split_sums, split_stats, sinks, query_start, context_lens, num_seqs, num_splits, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS_: tl.constexpr, IS_DECODE: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT_: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    _, q_row, head, _, is_row, first, end = _rows_of(
        tile, kv_head, query_start, context_lens, num_seqs, QUERIES, GROUP, ROWS_, IS_DECODE, WINDOW
    )
    dim = tl.arange(0, DIM)
    peak = tl.full([ROWS_], float("-inf"), tl.float32)
    total = tl.zeros([ROWS_], tl.float32)
    sums = tl.zeros([ROWS_, DIM], tl.float32)
    base = (tile.to(tl.int64) * tl.num_programs(1) + kv_head) * num_splits
    for split in range(first // SPLIT_, (end + SPLIT_ - 1) // SPLIT_):
        at = (base + split) * ROWS_ + tl.arange(0, ROWS_)
        part_peak, part_total = tl.load(split_stats + at * 2), tl.load(split_stats + at * 2 + 1)
        part_sums = tl.load(split_sums + at[:, None] * DIM + dim[None, :])
        peak, total, sums = _merge(peak, total, sums, part_peak, part_total, part_sums)
    mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    _store_rows(out, sums, peak, total, sinks, q_row, head, mask, dim, GROUP, HEAD_DIM, HAS_SINKS)
