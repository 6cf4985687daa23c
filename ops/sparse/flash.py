"""Block-sparse flash attention in Triton: a program has a piece of a row of blocks; full blocks run first, without a check.

    x = scale log2(e) q k' + log2(e) bias, or -inf where nothing is seen;  p = exp2(x - lse);  out = p v

A program has OUTER tokens of its own block and takes the blocks of the other side INNER tokens at a time; both divide BLOCK.
What lies beyond the end of a sequence is cut by the blocks' masks.
"""
import triton
import triton.language as tl

from ..threefry.kernel import threefry2x32

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def forward(
    q, k, v, out, lse, parts, part_lse, pieces, index, mask, masks, padding, bias, key,
    qz, qh, qn, kz, kh, kn, vz, vh, vn, bz, bh, bi, bj, copies, heads, shared, group, Nq, Nk, scale, remain,
    HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    PADDING: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):
    z, h, copy, row, local, first, middle, end, place = task(pieces, copies, shared, Nq, BLOCK, OUTER)
    zh, hk = z * heads + h, (h // group).to(tl.int64)
    i0 = row * BLOCK + local
    rows = tl.minimum(Nq - i0, BLOCK)
    Q = load(q + z * qz + h * qh, qn, i0, rows, HEAD, DIM, OUTER, True)
    k += z * kz + hk * kh
    v += z * vz + hk * vh
    i, j = tl.arange(0, OUTER)[:, None], tl.arange(0, INNER)[None, :]
    acc = tl.zeros((OUTER, DIM), tl.float32)
    top = tl.full((OUTER,), -float("inf"), tl.float32)
    total = tl.zeros((OUTER,), tl.float32)
    STEPS: tl.constexpr = BLOCK // INNER
    for CUT in tl.static_range(2):
        for t in range((middle if CUT else first) * STEPS, (end if CUT else middle) * STEPS):
            start = t % STEPS * INNER
            j0 = tl.load(index + t // STEPS) * BLOCK + start
            columns = tl.minimum(Nk - j0, BLOCK)
            K = load(k, kn, j0, columns, HEAD, DIM, INNER, CUT)
            V = load(v, vn, j0, columns, HEAD, DIM, INNER, CUT)
            x = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
            if CUT or PADDING or BIAS:
                x = seen(x, mask + t // STEPS, masks, i0, i, local, j0, j, start, z, h, padding, bias, bz, bh, bi, bj, Nq, Nk,
                         scale, BLOCK, CUT, PADDING, BIAS)
                new = tl.maximum(top, tl.max(x, 1))
                ref = tl.where(new == -float("inf"), 0.0, new)
                p = tl.math.exp2(x - ref[:, None])
            else:
                new = tl.maximum(top, tl.max(x, 1) * (scale * LOG2E))
                ref = new
                p = tl.math.exp2(x * (scale * LOG2E) - ref[:, None])
            fade = tl.math.exp2(top - ref)
            total = total * fade + tl.sum(p, 1)
            if DROPOUT:
                p *= kept(key, z, h, heads, i0 + i, j0 + j, Nq, Nk, remain)
            acc = tl.dot(p.to(V.dtype), V, acc * fade[:, None], input_precision=PRECISION)
            top = new
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    acc /= total[:, None]
    top = tl.where(empty, -float("inf"), top + tl.math.log2(total))
    n = tl.arange(0, OUTER)
    if place < 0:
        store(out + zh * Nq * HEAD, i0, rows, acc, HEAD, DIM, OUTER)
        tl.store(lse + zh * Nq + i0 + n, top / LOG2E, n < rows)
    else:
        part = (place.to(tl.int64) * copies + copy) * BLOCK
        store(parts + part * HEAD, local, BLOCK, acc, HEAD, DIM, OUTER)
        tl.store(part_lse + part + local + n, top, n < BLOCK)


@triton.jit
def merge(parts, part_lse, out, lse, splits, copies, heads, shared, N, HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
          TILE: tl.constexpr, SOFTMAX: tl.constexpr):
    """A row from its parts: their sum, or their mean weighted by exp(lse)."""
    blocks: tl.constexpr = BLOCK // TILE
    at, local = tl.program_id(0) // blocks, tl.program_id(0) % blocks * TILE
    copy = at % copies
    splits += at // copies * 3
    line, first, count = tl.load(splits), tl.load(splits + 1).to(tl.int64), tl.load(splits + 2)
    z, h, row = place_of(line, copy, shared, N, BLOCK)
    n = tl.arange(0, TILE)
    acc = tl.zeros((TILE, DIM), tl.float32)
    top = tl.full((TILE,), -float("inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    for s in range(count):
        part = ((first + s) * copies + copy) * BLOCK
        x = load(parts + part * HEAD, HEAD, local, BLOCK - local, HEAD, DIM, TILE, True)
        if SOFTMAX:
            e = tl.load(part_lse + part + local + n, n < BLOCK - local, -float("inf"))
            new = tl.maximum(top, e)
            ref = tl.where(new == -float("inf"), 0.0, new)
            fade, weight = tl.math.exp2(top - ref), tl.math.exp2(e - ref)
            acc = acc * fade[:, None] + x * weight[:, None]
            total = total * fade + weight
            top = new
        else:
            acc += x
    i0 = row * BLOCK + local
    rows = tl.minimum(N - i0, BLOCK - local)
    zh = z * heads + h
    if SOFTMAX:
        empty = total == 0
        total = tl.where(empty, 1.0, total)
        acc /= total[:, None]
        tl.store(lse + zh * N + i0 + n, tl.where(empty, -float("inf"), top + tl.math.log2(total)) / LOG2E, n < rows)
    store(out + zh * N * HEAD, i0, rows, acc, HEAD, DIM, TILE)


@triton.jit
def rowsums(a, b, out, az, ah, an, heads, N, HEAD: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr):
    """sum a b over each row of a head; b is contiguous."""
    zh, n0 = tl.program_id(1).to(tl.int64), tl.program_id(0) * TILE
    rows = N - n0
    A = load(a + zh // heads * az + zh % heads * ah, an, n0, rows, HEAD, DIM, TILE, True).to(tl.float32)
    B = load(b + zh * N * HEAD, HEAD, n0, rows, HEAD, DIM, TILE, True).to(tl.float32)
    n = tl.arange(0, TILE)
    tl.store(out + zh * N + n0 + n, tl.sum(A * B, 1), n < rows)


@triton.jit
def backward_rows(
    q, k, v, g, dq, dbias, lse, delta, parts, pieces, index, mask, masks, padding, bias, key,
    qz, qh, qn, kz, kh, kn, vz, vh, vn, gz, gh, gn, bz, bh, bi, bj, dbz, dbh, dbi, dbj,
    copies, heads, shared, group, Nq, Nk, scale, remain,
    HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    PADDING: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):
    """dq = scale ds k, where ds = p (g v' - delta); dbias = ds, summed where bias is broadcast."""
    z, h, copy, row, local, first, middle, end, place = task(pieces, copies, shared, Nq, BLOCK, OUTER)
    zh, hk = z * heads + h, (h // group).to(tl.int64)
    i0 = row * BLOCK + local
    rows = tl.minimum(Nq - i0, BLOCK)
    Q = load(q + z * qz + h * qh, qn, i0, rows, HEAD, DIM, OUTER, True)
    G = load(g + z * gz + h * gh, gn, i0, rows, HEAD, DIM, OUTER, True)
    n = tl.arange(0, OUTER)
    L = finite(tl.load(lse + zh * Nq + i0 + n, n < rows, 0.0))[:, None]
    D = tl.load(delta + zh * Nq + i0 + n, n < rows, 0.0)[:, None]
    k += z * kz + hk * kh
    v += z * vz + hk * vh
    i, j = n[:, None], tl.arange(0, INNER)[None, :]
    acc = tl.zeros((OUTER, DIM), tl.float32)
    STEPS: tl.constexpr = BLOCK // INNER
    for CUT in tl.static_range(2):
        for t in range((middle if CUT else first) * STEPS, (end if CUT else middle) * STEPS):
            start = t % STEPS * INNER
            j0 = tl.load(index + t // STEPS) * BLOCK + start
            columns = tl.minimum(Nk - j0, BLOCK)
            K = load(k, kn, j0, columns, HEAD, DIM, INNER, CUT)
            V = load(v, vn, j0, columns, HEAD, DIM, INNER, CUT)
            x = seen(tl.dot(Q, tl.trans(K), input_precision=PRECISION), mask + t // STEPS, masks, i0, i, local, j0, j, start, z, h,
                     padding, bias, bz, bh, bi, bj, Nq, Nk, scale, BLOCK, CUT, PADDING, BIAS)
            dp = tl.dot(G, tl.trans(V), input_precision=PRECISION)
            if DROPOUT:
                dp *= kept(key, z, h, heads, i0 + i, j0 + j, Nq, Nk, remain)
            ds = tl.math.exp2(x - L) * (dp - D)
            if BIAS:
                at = dbias + z * dbz + h * dbh + (i0 + i).to(tl.int64) * dbi + (j0 + j).to(tl.int64) * dbj
                tl.atomic_add(at, ds, (i < rows) & (j < columns), sem="relaxed")
            acc = tl.dot(ds.to(K.dtype), K, acc, input_precision=PRECISION)
    acc *= scale
    if place < 0:
        store(dq + zh * Nq * HEAD, i0, rows, acc, HEAD, DIM, OUTER)
    else:
        store(parts + (place.to(tl.int64) * copies + copy) * BLOCK * HEAD, local, BLOCK, acc, HEAD, DIM, OUTER)


@triton.jit
def backward_columns(
    q, k, v, g, dk, dv, lse, delta, part_dk, part_dv, pieces, index, mask, masks, padding, bias, key,
    qz, qh, qn, kz, kh, kn, vz, vh, vn, gz, gh, gn, bz, bh, bi, bj, copies, heads, shared, group, Nq, Nk, scale, remain,
    HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    PADDING: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):
    """dk = scale ds' q and dv = p' g, for each of the query's heads; the scores are transposed, [key, query]."""
    z, h, copy, column, local, first, middle, end, place = task(pieces, copies, shared, Nk, BLOCK, OUTER)
    zh, hk = z * heads + h, (h // group).to(tl.int64)
    j0 = column * BLOCK + local
    columns = tl.minimum(Nk - j0, BLOCK)
    K = load(k + z * kz + hk * kh, kn, j0, columns, HEAD, DIM, OUTER, True)
    V = load(v + z * vz + hk * vh, vn, j0, columns, HEAD, DIM, OUTER, True)
    q += z * qz + h * qh
    g += z * gz + h * gh
    lse += zh * Nq
    delta += zh * Nq
    n = tl.arange(0, INNER)
    i, j = n[None, :], tl.arange(0, OUTER)[:, None]
    acc_k = tl.zeros((OUTER, DIM), tl.float32)
    acc_v = tl.zeros((OUTER, DIM), tl.float32)
    STEPS: tl.constexpr = BLOCK // INNER
    for CUT in tl.static_range(2):
        for t in range((middle if CUT else first) * STEPS, (end if CUT else middle) * STEPS):
            start = t % STEPS * INNER
            i0 = tl.load(index + t // STEPS) * BLOCK + start
            rows = tl.minimum(Nq - i0, BLOCK)
            Q = load(q, qn, i0, rows, HEAD, DIM, INNER, CUT)
            G = load(g, gn, i0, rows, HEAD, DIM, INNER, CUT)
            if CUT:
                L, D = tl.load(lse + i0 + n, n < rows, 0.0), tl.load(delta + i0 + n, n < rows, 0.0)
            else:
                L, D = tl.load(lse + i0 + n), tl.load(delta + i0 + n)
            x = seen(tl.dot(K, tl.trans(Q), input_precision=PRECISION), mask + t // STEPS, masks, i0, i, start, j0, j, local, z, h,
                     padding, bias, bz, bh, bi, bj, Nq, Nk, scale, BLOCK, CUT, PADDING, BIAS)
            p = tl.math.exp2(x - finite(L)[None, :])
            dp = tl.dot(V, tl.trans(G), input_precision=PRECISION)
            if DROPOUT:
                keep = kept(key, z, h, heads, i0 + i, j0 + j, Nq, Nk, remain)
                acc_v = tl.dot((p * keep).to(G.dtype), G, acc_v, input_precision=PRECISION)
                dp *= keep
            else:
                acc_v = tl.dot(p.to(G.dtype), G, acc_v, input_precision=PRECISION)
            ds = p * (dp - D[None, :])
            acc_k = tl.dot(ds.to(Q.dtype), Q, acc_k, input_precision=PRECISION)
    acc_k *= scale
    if place < 0:
        store(dk + zh * Nk * HEAD, j0, columns, acc_k, HEAD, DIM, OUTER)
        store(dv + zh * Nk * HEAD, j0, columns, acc_v, HEAD, DIM, OUTER)
    else:
        part = (place.to(tl.int64) * copies + copy) * BLOCK * HEAD
        store(part_dk + part, local, BLOCK, acc_k, HEAD, DIM, OUTER)
        store(part_dv + part, local, BLOCK, acc_v, HEAD, DIM, OUTER)


@triton.jit
def task(pieces, copies, shared, N, BLOCK: tl.constexpr, OUTER: tl.constexpr):
    """What this program does: batch, head, copy, row, first token in the row, first block, end of full ones, end, place."""
    tiles: tl.constexpr = BLOCK // OUTER
    at, local = tl.program_id(0) // tiles, tl.program_id(0) % tiles * OUTER
    copy = at % copies
    pieces += at // copies * 5
    z, h, row = place_of(tl.load(pieces), copy, shared, N, BLOCK)
    return z, h, copy, row, local, tl.load(pieces + 1), tl.load(pieces + 2), tl.load(pieces + 3), tl.load(pieces + 4)


@triton.jit
def place_of(line, copy, shared, N, BLOCK: tl.constexpr):
    """Batch, head and row. Either all heads share one list, or each has its own lines."""
    lines = (N + BLOCK - 1) // BLOCK
    return (copy // shared).to(tl.int64), (copy % shared + line // lines).to(tl.int64), line % lines


@triton.jit
def load(x, stride, first, rows, HEAD: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, CHECK: tl.constexpr):
    """[TILE, DIM] from row `first` on, 0 beyond `rows` and HEAD."""
    n, d = tl.arange(0, TILE)[:, None], tl.arange(0, DIM)[None, :]
    at = x + first.to(tl.int64) * stride + n * stride + d
    if CHECK and HEAD < DIM:
        tile = tl.load(at, (n < rows) & (d < HEAD), 0.0)
    elif CHECK:
        tile = tl.load(at, n < rows, 0.0)
    elif HEAD < DIM:
        tile = tl.load(at, d < HEAD, 0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def store(x, first, rows, tile, HEAD: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr):
    n, d = tl.arange(0, TILE)[:, None], tl.arange(0, DIM)[None, :]
    at = x + first.to(tl.int64) * HEAD + n * HEAD + d
    tl.store(at, tile.to(x.dtype.element_ty), (n < rows) & (d < HEAD) if HEAD < DIM else n < rows)


@triton.jit
def seen(x, mask, masks, i0, i, i_start, j0, j, j_start, z, h, padding, bias, bz, bh, bi, bj, Nq, Nk, scale,
         BLOCK: tl.constexpr, CUT: tl.constexpr, PADDING: tl.constexpr, BIAS: tl.constexpr):
    """Scores in base 2 with bias, -inf where nothing is seen; i and j run along either side of the tile."""
    x *= scale * LOG2E
    if BIAS:
        inside = (i < Nq - i0) & (j < Nk - j0)
        at = bias + z * bz + h * bh + (i0 + i).to(tl.int64) * bi + (j0 + j).to(tl.int64) * bj
        x += tl.load(at, inside, 0.0).to(tl.float32) * LOG2E
    if CUT:
        at = masks + tl.load(mask).to(tl.int64) * BLOCK * BLOCK + (i_start + i) * BLOCK + j_start + j
        x = tl.where(tl.load(at) != 0, x, -float("inf"))
    if PADDING:
        x = tl.where(tl.load(padding + z * Nk + j0 + j, j < Nk - j0, 0) != 0, x, -float("inf"))
    return x


@triton.jit
def finite(lse):
    """lse in base 2, 0 where nothing is seen."""
    return tl.where(lse == -float("inf"), 0.0, lse * LOG2E)


@triton.jit
def kept(key, z, h, heads, i, j, Nq, Nk, remain):
    """Dropout's factor, 1 / remain or 0, by a draw at (row, h, i, j); key is two words and each row's place in the whole batch."""
    at = ((tl.load(key + 2 + z).to(tl.int64) * heads + h) * Nq + i) * Nk + j
    x0, x1 = threefry2x32(tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32), (at >> 32).to(tl.uint32), at.to(tl.uint32))
    draw = ((x0 ^ x1) >> 9).to(tl.float32) * 2**-23
    return tl.where(draw < remain, 1 / remain, 0.0)
