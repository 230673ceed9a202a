"""The rows that bench/gpu.py measures, and what a row counts."""

TOKENS, WIDTH = 16384, 2048  # of a plain row: batch * sequence, heads * head dim
OPERATIONS = ("forward", "backward", "decode")
LENGTHS = {"sm80": (512, 2048, 4096, 8192), "sm90": (512, 1024, 2048, 4096, 8192, 16384)}  # the stage ends in four minutes


def row(op="forward", dtype="bf16", d=128, sq=4096, causal=False, case="", h=None, hk=None, b=None, family="sm80"):
    h = h or WIDTH // d
    return {
        "op": op, "backend": "cuda", "family": family, "dtype": dtype, "b": b or TOKENS // sq, "h": h, "hk": hk or h,
        "sq": sq, "sk": sq, "d": d, "dv": d, "causal": causal, "case": case, "threads": 1,
    }  # fmt: skip


def grid(op, family="sm80", widths=(64, 128, 256)):
    for d in widths:
        for sq in LENGTHS[family]:
            for causal in (False, True):
                yield row(op, d=d, sq=sq, causal=causal, family=family)
    for causal in (False, True):
        yield row(op, causal=causal, case="gqa4", h=32, hk=8, family=family)


def special(op):
    """What this family is for beside the plain rows; the judge is their own plain row, or PyTorch's fp32."""
    for case in ("bias", "mask", "softcap", "alibi", "dropout", "unaligned"):
        yield row(op, case=case)
    if op == "forward":
        yield row(op, case="transposed")
    yield row(op, case="window1024", causal=True)
    for d in (100, 111) if op == "forward" else (100,):
        yield row(op, d=d, h=16, case=f"d{d}")
    for d in (64, 128):
        for causal in (False, True):
            yield row(op, d=d, causal=causal, dtype="fp32", sq=2048)
    yield row(op, dtype="fp16")
    yield row(op, case="varlen", causal=True, h=16, b=32, sq=16384)
    if op == "backward":
        for d in (64, 128, 256):
            for sq in (2048, 8192):
                for causal in (False, True):
                    yield row(op, d=d, sq=sq, causal=causal, case="deterministic")


def hopper():
    """Of the family that is for Hopper alone, forward."""
    yield from grid("forward", "sm90")
    for case in ("softcap", "alibi"):
        yield row(case=case, family="sm90")
    yield row(case="window1024", causal=True, family="sm90")
    yield row(dtype="fp16", family="sm90")
    yield row(case="varlen", causal=True, h=16, b=32, sq=16384, family="sm90")


def hopper_backward():
    """The same backward."""
    yield from grid("backward", "sm90", (64, 128, 256))
    for sq in (2048, 16384):
        for causal in (False, True):
            yield row("backward", d=192, sq=sq, causal=causal, family="sm90")
    yield row("backward", case="window1024", causal=True, family="sm90")
    yield row("backward", dtype="fp16", family="sm90")
    yield row("backward", case="varlen", causal=True, h=16, b=32, sq=16384, family="sm90")
    for d in (64, 128, 256):
        for causal in (False, True):
            yield row("backward", d=d, sq=2048, causal=causal, case="deterministic", family="sm90")
    yield row("backward", sq=8192, causal=True, case="deterministic", family="sm90")


def decode_row(b, sk, case="", **changes):
    return {**row("decode", b=b, sq=1, h=32, hk=8, case=case), "sk": sk, "causal": True, **changes}


def decode_rows():
    """One query row over caches; several rows, pages in no order, lengths by Zipf's law, bits that no batch changes, other head dims."""
    for b, sk in ((1, 1024), (1, 4096), (1, 8192), (8, 2048), (4, 8192), (3, 16384), (9, 8192), (20, 4096), (1, 131072),
                  (16, 8192), (64, 4096), (128, 8192)):  # fmt: skip
        yield decode_row(b, sk)
    for b, sk in ((1, 8192), (16, 8192), (64, 4096)):
        for case in ("paged16", "invariant"):
            yield decode_row(b, sk, case)
    for b, sk in ((1, 8192), (16, 8192)):
        yield decode_row(b, sk, "rows4", sq=4)
    yield decode_row(32, 16384, "zipf")
    for b in (16, 64):
        yield decode_row(b, 8192, "d64", d=64, dv=64)
    yield decode_row(8, 8192, "d256", d=256, dv=256)
    for b, h in ((16, 16), (64, 16), (128, 16), (64, 64), (128, 64), (128, 128)):
        yield decode_row(b, 8192, "mla", h=h, hk=1, d=576, dv=512, family="sm90")


def all_rows():
    for op in ("forward", "backward"):
        yield from grid(op)
        yield from special(op)
    yield from hopper()
    yield from hopper_backward()
    yield from decode_rows()


def is_plain(row):
    return row["case"] in ("", "gqa4")


def plain_of(special_row):
    """The plain row whose rate a special one is compared with: a deterministic one's of its own shape."""
    op, causal, family = special_row["op"], special_row["causal"], special_row["family"]
    if op == "decode":
        return decode_row(special_row["b"], special_row["sk"])
    if special_row["case"] == "deterministic":
        return row(op, d=special_row["d"], sq=special_row["sq"], causal=causal, family=family)
    return row(op, causal=causal, family=family)


def zipf_lengths(row):
    return [row["sq"] // place for place in range(1, row["b"] + 1)]


def page_of(row):
    """Slots of a page, or 0."""
    return int(row["case"].removeprefix("paged")) if row["case"].startswith("paged") else 0


def cache_lengths(row):
    """Of a decode row's sequences."""
    return [row["sk"] // place for place in range(1, row["b"] + 1)] if row["case"] == "zipf" else [row["sk"]] * row["b"]


def window_of(row):
    """Keys that a row of a window case sees at most, or None."""
    return int(row["case"].removeprefix("window")) if row["case"].startswith("window") else None


def flops(row):
    """By the fused formula; a causal row counts half of S^2, a window and varlen what is visible."""
    if row["case"] == "varlen":
        pairs = sum(n * n / 2 for n in zipf_lengths(row)) * row["h"]
    else:
        square, window = row["sq"] * row["sk"], window_of(row)
        seen = sum(min(i + 1, window) for i in range(row["sq"])) if window else square / 2 if row["causal"] else square
        pairs = row["b"] * row["h"] * seen
    columns = 3 * row["d"] + 2 * row["dv"] if row["op"] == "backward" else row["d"] + row["dv"]
    return 2 * columns * pairs
