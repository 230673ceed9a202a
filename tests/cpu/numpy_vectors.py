#!/usr/bin/env python3
"""Writes data/forward_vectors.json: what attention answers by the contract, from NumPy in double precision.

A third statement of the contract: whole matrices, einsum and softmax, with no loop over keys. It shares nothing with the
C++ oracle that is checked against it. Run it after changing a case: `numpy_vectors.py`; the file is committed.
"""

import json
from pathlib import Path

import numpy as np

INF = float("inf")
HALF_SPLIT, INTERLEAVED = False, True


def philox4x32_10(counter, key):
    """counter: four arrays, key: two ints; Random123's Philox4x32-10 on 64-bit arrays."""
    mask = np.uint64(0xFFFFFFFF)
    c = [np.asarray(word, dtype=np.uint64) & mask for word in counter]
    k = [np.uint64(word) for word in key]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(second >> np.uint64(32)) ^ c[1] ^ k[0], second & mask, (first >> np.uint64(32)) ^ c[3] ^ k[1], first & mask]
        k = [(k[0] + np.uint64(0x9E3779B9)) & mask, (k[1] + np.uint64(0xBB67AE85)) & mask]
    return c


def kept(p, seed, offset, origin, b, shape):
    """Factors (h, sq, sk) of dropout for sequence b."""
    h, sq, sk = shape
    ob, oh, oi, oj, heads = origin
    n = int(np.floor(65536 * (1 - p) + 0.5))
    head, i, j = np.meshgrid(np.arange(h) + oh, np.arange(sq) + oi, np.arange(sk) + oj, indexing="ij")
    row = (b + ob) * (heads or h) + head
    words = philox4x32_10((j // 8, i, row, np.full_like(i, offset)), (seed & 0xFFFFFFFF, seed >> 32))
    word = np.choose((j % 8) // 2, words)
    half = np.where(j % 2 == 0, word & np.uint64(0xFFFF), word >> np.uint64(16))
    return np.where(half < n, 65536.0 / n, 0.0)


def seen(sq, sk, shift, options):
    """Boolean (sq, sk): which keys the geometric rules leave each query."""
    p = np.arange(sq)[:, None] + shift
    j = np.arange(sk)[None, :]
    left, right = options.get("window", (-1, -1))
    allowed = np.ones((sq, sk), bool)
    if options.get("causal"):
        allowed &= j <= p
    if left >= 0:
        allowed &= j >= p - left
    if right >= 0:
        allowed &= j <= p + right
    if options.get("chunk"):
        allowed &= np.floor_divide(j, options["chunk"]) == np.floor_divide(p, options["chunk"])
    return allowed


def attention(q, k, v, b, options, tensors):
    """One sequence: q (sq, h, d), k (sk, hk, d), v (sk, hk, dv) -> o (sq, h, dv), lse (h, sq)."""
    (sq, h, d), sk = q.shape, k.shape[0]
    group = h // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    shift = 0 if options.get("causal") == "top_left" else sk - sq
    if "shift" in tensors:
        shift = int(tensors["shift"][b])
    scores = np.einsum("ihd,jhd->hij", q, k) * options.get("scale", d**-0.5)
    if options.get("softcap"):
        scores = options["softcap"] * np.tanh(scores / options["softcap"])
    if "alibi_slopes" in tensors:
        slopes = np.broadcast_to(tensors["alibi_slopes"], (b + 1, h) if tensors["alibi_slopes"].ndim == 1 else
                                 tensors["alibi_slopes"].shape)[b]
        away = np.abs(np.arange(sq)[:, None] + shift - np.arange(sk)[None, :])
        scores = scores - slopes[:, None, None] * away
    for name in ("bias", "mask"):
        if name in tensors:
            full = tensors[name].reshape((1,) * (4 - tensors[name].ndim) + tensors[name].shape)
            full = full[b if full.shape[0] > 1 else 0]
            full = full[:, : sq if full.shape[1] > 1 else 1, : sk if full.shape[2] > 1 else 1]
            if name == "bias":
                scores = scores + full
            else:
                scores = np.where(full != 0, scores, -INF)
    allowed = seen(sq, sk, shift, options)
    for name in ("key_begin", "key_end"):
        if name in tensors:
            bound = tensors[name][tensors["cu_seqlens_q"][b] :] if tensors[name].ndim == 1 else tensors[name][b]
            inside = np.arange(sk)[None, :] >= bound[:sq, None]
            allowed = allowed & (inside if name == "key_begin" else ~inside)
    scores = np.where(allowed[None], scores, -INF)
    sinks = tensors.get("sinks", np.full(h, -INF))
    columns = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (h, sq, 1))], axis=2)
    top = columns.max(axis=2, keepdims=True)
    top = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(columns - top)
    total = weights.sum(axis=2, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    p = (weights / np.where(total == 0, 1.0, total))[..., :-1]
    if options.get("dropout"):
        p = p * kept(options["dropout"], options["seed"], options["offset"], options.get("origin", (0,) * 5), b, p.shape)
    return np.einsum("hij,jhd->ihd", p, v), lse


def rotated(x, first, tensors, interleaved):
    """x (rows, heads, d) turned by the angles of positions first, first + 1, ..."""
    if "rotary_cos" not in tensors or len(x) == 0:
        return x
    turn = (tensors["rotary_cos"] + 1j * tensors["rotary_sin"])[first : first + len(x), None, :]
    r = turn.shape[-1]
    out = x.copy()
    if interleaved:
        z = (x[..., 0 : 2 * r : 2] + 1j * x[..., 1 : 2 * r : 2]) * turn
        out[..., 0 : 2 * r : 2], out[..., 1 : 2 * r : 2] = z.real, z.imag
    else:
        z = (x[..., :r] + 1j * x[..., r : 2 * r]) * turn
        out[..., :r], out[..., r : 2 * r] = z.real, z.imag
    return out


def query_rows(t, b):
    if "cu_seqlens_q" in t:
        rows = np.arange(t["cu_seqlens_q"][b], t["cu_seqlens_q"][b + 1])
    else:
        rows = np.arange(t["q"].shape[1])
    return rows[: t["seqused_q"][b]] if "seqused_q" in t else rows


def keys_and_values(t, b, options):
    """The keys that sequence b attends to, appending to t["k"] and t["v"] what is new."""
    if "cu_seqlens_k" in t:
        rows = slice(t["cu_seqlens_k"][b], t["cu_seqlens_k"][b + 1])
        k, v = t["k"][rows], t["v"][rows]
    elif "cache_seqlens" not in t:
        k, v = t["k"][b], t["v"][b]
    else:
        return cached(t, b, options)
    used = t["seqused_k"][b] if "seqused_k" in t else len(k)
    return k[:used], v[:used]


def cached(t, b, options):
    filled = int(t["cache_seqlens"][b])
    row = int(t["cache_batch_idx"][b]) if "cache_batch_idx" in t else b
    new_k = new_v = None
    if "k_new" in t:
        if "cu_seqlens_k_new" in t:
            rows = slice(t["cu_seqlens_k_new"][b], t["cu_seqlens_k_new"][b + 1])
            new_k, new_v = t["k_new"][rows], t["v_new"][rows]
        else:
            new_k, new_v = t["k_new"][b], t["v_new"][b]
        new_k = rotated(new_k, filled, t, options.get("rotary_interleaved"))
    end = filled + (0 if new_k is None else len(new_k))
    if "block_table" in t:
        size = t["k"].shape[1]
        slot = np.arange(end)
        where = (t["block_table"][row][slot // size], slot % size)
    else:
        where = (np.full(end, row), np.arange(end))
    if new_k is not None:
        t["k"][where[0][filled:], where[1][filled:]] = new_k
        t["v"][where[0][filled:], where[1][filled:]] = new_v
    first = int(t["leftpad"][b]) if "leftpad" in t else 0
    return t["k"][where][first:], t["v"][where][first:]


def run(tensors, options):
    t = {name: value.copy() for name, value in tensors.items()}
    packed = "cu_seqlens_q" in t
    batch = len(t["cu_seqlens_q"]) - 1 if packed else t["q"].shape[0]
    h, dv = t["q"].shape[-2], t["v"].shape[-1]
    o = np.zeros(t["q"].shape[:-1] + (dv,))
    lse = np.full((h, len(o)) if packed else (batch, h, o.shape[1]), -INF)
    for b in range(batch):
        k, v = keys_and_values(t, b, options)
        rows = query_rows(t, b)
        q = t["q"][rows] if packed else t["q"][b][rows]
        if "rotary_cos" in t:
            base = t["rotary_base"] if "rotary_base" in t else t["cache_seqlens"]
            q = rotated(q, int(base[b]), t, options.get("rotary_interleaved"))
        part, part_lse = attention(q, k, v, b, options, t)
        if packed:
            o[rows], lse[:, rows] = part, part_lse
        else:
            o[b, rows], lse[b][:, rows] = part, part_lse
    results = {"o": o, "lse": lse}
    if "k_new" in t:
        results |= {"k_after": t["k"], "v_after": t["v"]}
    return results


class Cases:
    def __init__(self):
        self.rng = np.random.default_rng(20240607)
        self.cases = []

    def normal(self, *shape, scale=1.0):
        return np.round(self.rng.normal(size=shape) * scale, 2)

    def add(self, name, tensors, **options):
        tensors = {key: np.asarray(value) for key, value in tensors.items()}
        self.cases.append({"name": name, "options": options, "tensors": tensors, "results": run(tensors, options)})

    def dense(self, name, sizes=(2, 5, 7, 2, 1, 4, 3), tensors=None, **options):
        b, sq, sk, h, hk, d, dv = sizes
        given = {"q": self.normal(b, sq, h, d), "k": self.normal(b, sk, hk, d), "v": self.normal(b, sk, hk, dv)}
        self.add(name, given | (tensors or {}), **options)

    def packed(self, name, cu_q, cu_k, h=2, hk=1, d=4, dv=3, slack=0, tensors=None, **options):
        q, k, v = (self.normal(cu[-1] + slack, heads, width)
                   for cu, heads, width in ((cu_q, h, d), (cu_k, hk, d), (cu_k, hk, dv)))
        given = {"q": q, "k": k, "v": v, "cu_seqlens_q": np.array(cu_q), "cu_seqlens_k": np.array(cu_k)}
        self.add(name, given | (tensors or {}), **options)

    def cache(self, name, q, seqlens, slots, tensors=None, h=2, hk=1, d=4, dv=3, **options):
        """slots: shape (rows, capacity) or (pages, page size)."""
        given = {"q": q, "k": self.normal(*slots, hk, d), "v": self.normal(*slots, hk, dv),
                 "cache_seqlens": np.array(seqlens)}
        self.add(name, given | (tensors or {}), **options)


def rules(c):
    c.dense("dense")
    c.dense("gqa_6_over_2_dv_5", (1, 3, 4, 6, 2, 2, 5))
    c.dense("E01_causal_bottom_right_2_5", (1, 2, 5, 2, 2, 4, 3), causal="bottom_right")
    c.dense("E01_causal_bottom_right_5_2", (1, 5, 2, 2, 2, 4, 3), causal="bottom_right")
    c.dense("causal_top_left", causal="top_left")
    c.dense("window_2_1", window=(2, 1))
    c.dense("window_left_only_causal", window=(1, -1), causal="bottom_right")
    c.dense("window_right_only_top_left_has_no_causal", window=(-1, 0))
    c.dense("chunk_3", chunk=3)
    c.dense("chunk_3_negative_positions", (1, 7, 4, 2, 1, 4, 3), chunk=3)
    c.dense("shift_each_sequence", tensors={"shift": np.array([3, -2])}, causal="bottom_right")
    c.dense("shift_window_chunk", tensors={"shift": np.array([1, -4])}, window=(3, 2), chunk=4)
    c.dense("alibi_h", tensors={"alibi_slopes": [0.5, 0.125]})
    c.dense("alibi_b_h_causal", tensors={"alibi_slopes": [[0.5, 0.25], [1.0, 2.0]]}, causal="bottom_right")
    c.dense("alibi_top_left", tensors={"alibi_slopes": [0.5, 0.125]}, causal="top_left")
    c.dense("bias_full", tensors={"bias": c.normal(2, 2, 5, 7)})
    c.dense("bias_by_key", tensors={"bias": c.normal(7)})
    c.dense("bias_by_query_and_batch", tensors={"bias": c.normal(2, 1, 5, 1)})
    c.dense("bias_minus_inf_masks", tensors={"bias": np.where(c.normal(5, 7) > 0.5, -INF, c.normal(5, 7))})
    mask = c.normal(2, 1, 5, 7) > 0
    mask[1, 0, 2] = False
    c.dense("A14_mask_with_an_empty_row", tensors={"mask": mask})
    c.dense("mask_by_key", tensors={"mask": np.array([True, False, True, True, False, True, True])})
    c.dense("I02_softcap", softcap=1.5, scale=3.0)
    c.dense("sinks", tensors={"sinks": [0.5, -INF]})
    c.dense("A16_sink_and_empty_rows", (1, 5, 2, 2, 2, 4, 3), tensors={"sinks": [0.5, 2.0]}, causal="bottom_right")
    c.dense("A16_sink_100", tensors={"sinks": [100.0, 1.0]})
    c.dense("B09_scale_0_causal", scale=0.0, causal="bottom_right")
    c.dense("B09_scale_negative_causal", scale=-0.7, causal="bottom_right")
    c.dense("dropout", dropout=0.3, seed=0x123456789ABCDEF0, offset=7)
    c.dense("dropout_at_an_origin", (1, 3, 18, 2, 2, 2, 2), dropout=0.5, seed=42, offset=4294967295, origin=(3, 4, 5, 6, 11),
            causal="bottom_right")
    c.dense("everything", tensors={"alibi_slopes": [0.5, 0.125], "bias": c.normal(1, 2, 1, 7), "sinks": [0.1, 0.2],
                                   "mask": c.normal(5, 7) > -1.0}, softcap=2.0, window=(4, -1), causal="bottom_right",
            dropout=0.25, seed=5, offset=6)
    c.dense("C06_no_keys", (1, 3, 0, 2, 1, 4, 3))
    c.dense("no_queries", (1, 0, 3, 2, 1, 4, 3))


def lengths(c):
    c.packed("varlen", [0, 3, 5, 9], [0, 2, 7, 11])
    c.packed("C01_varlen_empty_sequences_causal", [0, 0, 3, 5, 5], [0, 2, 4, 5, 8], causal="bottom_right")
    c.packed("C03_varlen", [0, 1, 1, 2], [0, 3, 3, 8], h=9, hk=3, d=2, dv=2, causal="bottom_right", scale=1.0)
    c.packed("C04_varlen", [0, 0, 0, 0, 1], [0, 0, 0, 0, 1], h=3, hk=1)
    c.packed("C08_varlen_slack_with_sink", [0, 2, 4], [0, 3, 6], slack=2, tensors={"sinks": [0.5, 1.0]})
    c.packed("varlen_seqused", [0, 3, 6], [0, 4, 9], tensors={"seqused_q": [2, 3], "seqused_k": [4, 2], "sinks": [0.5, 1.0]},
             causal="bottom_right")
    c.packed("varlen_rules", [0, 3, 5], [0, 2, 7], tensors={"bias": c.normal(2, 1, 3, 5), "alibi_slopes": [[.5, .25], [1, 2]]},
             chunk=2, dropout=0.4, seed=9, offset=1)
    c.dense("dense_seqused", tensors={"seqused_q": [4, 0], "seqused_k": [3, 7], "sinks": [0.5, 1.0]}, causal="bottom_right")


def caches(c):
    dense_q = lambda rows: c.normal(2, rows, 2, 4)
    c.cache("cache", dense_q(2), [3, 5], (2, 6), causal="bottom_right")
    c.cache("H17_leftpad_alibi", dense_q(3), [4, 6], (2, 6), {"leftpad": [1, 4], "alibi_slopes": [0.5, 0.25]},
            causal="bottom_right")
    c.cache("cache_batch_idx", dense_q(1), [2, 5], (4, 5), {"cache_batch_idx": [3, 0]})
    c.cache("cache_varlen_q", c.normal(5, 2, 4), [3, 6], (2, 6), {"cu_seqlens_q": [0, 1, 5]}, causal="bottom_right")
    c.cache("pages", dense_q(2), [5, 4], (6, 2), {"block_table": [[4, 1, 0], [2, 5, 3]]}, causal="bottom_right")
    c.cache("pages_duplicate_page_leftpad", dense_q(2), [6, 5], (4, 3), {"block_table": [[1, 1], [1, 3]], "leftpad": [2, 0]})
    c.cache("H15_pages_more_in_the_table", dense_q(1), [4, 2], (5, 2), {"block_table": [[4, 1, 0], [2, 3, 3]]})
    new = {"k_new": c.normal(2, 2, 1, 4), "v_new": c.normal(2, 2, 1, 3)}
    c.cache("append", dense_q(2), [3, 1], (2, 6), dict(new), causal="bottom_right")
    c.cache("append_pages_leftpad", dense_q(2), [3, 1], (5, 2), {"block_table": [[4, 1, 0], [2, 3, 3]], "leftpad": [1, 1]} | new,
            causal="bottom_right")
    varlen_new = {"k_new": c.normal(3, 1, 4), "v_new": c.normal(3, 1, 3), "cu_seqlens_k_new": [0, 0, 3]}
    c.cache("append_varlen", c.normal(4, 2, 4), [3, 2], (2, 6), {"cu_seqlens_q": [0, 1, 4]} | varlen_new, causal="bottom_right")
    angle = np.arange(9)[:, None] / 10.0 ** np.arange(2)[None, :]
    tables = {"rotary_cos": np.round(np.cos(angle), 4), "rotary_sin": np.round(np.sin(angle), 4)}
    c.cache("H20_rotary_append_interleaved", dense_q(2), [3, 1], (2, 6), tables | new, rotary_interleaved=INTERLEAVED)
    c.cache("H20_rotary_append_half", dense_q(2), [3, 1], (2, 6), tables | new, rotary_interleaved=HALF_SPLIT)
    narrow = {name: table[:, :1] for name, table in tables.items()}
    for form in (INTERLEAVED, HALF_SPLIT):
        c.cache(f"rotary_part_of_d_{form}", dense_q(2), [3, 1], (2, 6), narrow | new | {"leftpad": [1, 0]},
                rotary_interleaved=form, causal="bottom_right")
    c.cache("rotary_base", dense_q(2), [3, 5], (2, 6), tables | {"rotary_base": [6, 0]}, causal="bottom_right")


def intervals(c):
    begin, end = np.array([[0, 2, -9, 5, 9], [0, 0, 0, 3, 3]]), np.array([[3, 3, 99, 5, 2], [3, 3, 3, 7, 7]])
    c.dense("interval_with_empty_rows_and_a_sink", tensors={"key_begin": begin, "key_end": end, "sinks": [0.5, -INF]})
    c.dense("interval_begin_causal", tensors={"key_begin": begin}, causal="bottom_right")
    c.dense("interval_end_window", tensors={"key_end": end, "seqused_q": [4, 5]}, window=(2, 3))
    c.packed("interval_varlen", [0, 3, 5], [0, 4, 9], slack=1,
             tensors={"key_begin": np.array([1, 0, 3, 2, 0, 0]), "key_end": np.array([4, 2, 9, 5, 1, 9])})
    c.cache("interval_cache_leftpad", c.normal(2, 2, 2, 4), [5, 6], (2, 6),
            {"leftpad": [1, 0], "key_begin": np.array([[0, 1], [4, 0]]), "key_end": np.array([[2, 4], [6, 0]])})


def plain(value):
    """Numbers as JSON has them: infinities become strings, whole numbers lose their point."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.ravel().tolist()]
    if isinstance(value, float) and np.isinf(value):
        return "inf" if value > 0 else "-inf"
    return int(value) if isinstance(value, bool) or isinstance(value, float) and value.is_integer() else value


def tensor(value):
    return {"shape": list(value.shape), "data": plain(value)}


def main():
    cases = Cases()
    rules(cases)
    lengths(cases)
    caches(cases)
    intervals(cases)
    lines = [json.dumps({"name": case["name"], "options": case["options"],
                         "tensors": {name: tensor(value) for name, value in case["tensors"].items()},
                         "results": {name: tensor(value) for name, value in case["results"].items()}},
                        separators=(",", ":")) for case in cases.cases]
    target = Path(__file__).parent / "data" / "forward_vectors.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{target}: {len(lines)} cases, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
