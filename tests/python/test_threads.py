"""Several Python threads at once, and the GIL."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from reference import inputs

import narrows


def test_several_threads_at_once():
    cases = [
        (inputs(b=1, sq=40 + 3 * i, sk=50 + 5 * i, seed=i), {"causal": i % 2 == 0, "threads": i % 3}) for i in range(8)
    ]
    want = [narrows.attention(*arrays, **options, return_lse=True) for arrays, options in cases]

    def run(index):
        arrays, options = cases[index % len(cases)]
        return narrows.attention(*arrays, **options, return_lse=True)

    with ThreadPoolExecutor(8) as pool:
        for index, (o, lse) in enumerate(pool.map(run, range(160))):
            np.testing.assert_array_equal(o, want[index % len(cases)][0])
            np.testing.assert_array_equal(lse, want[index % len(cases)][1])


def test_every_kind_of_call_at_once():
    q, k, v = inputs(b=1, sq=30, sk=50)
    o, lse = narrows.attention(q, k, v, return_lse=True)
    halves = [narrows.attention(q, k[:, x], v[:, x], return_lse=True) for x in (slice(0, 20), slice(20, 50))]
    new = {"k_new": k[:, :5], "v_new": v[:, :5]}
    calls = [
        lambda: narrows.attention_backward(o, q, k, v, o, lse).dk,
        lambda: narrows.attention_with_cache(q, k.copy(), v.copy(), cache_seqlens=30, **new),
        lambda: narrows.merge(halves)[0],
        lambda: narrows.merge_backward(halves, o)[0][1][1],
        lambda: narrows.attention(q, k, v, dropout=0.5, seed=1),
    ]
    want = [call() for call in calls]
    with ThreadPoolExecutor(8) as pool:
        for index, got in enumerate(pool.map(lambda i: calls[i % len(calls)](), range(150))):
            np.testing.assert_array_equal(got, want[index % len(calls)])


def test_bits_do_not_depend_on_threads():
    arrays = inputs(sq=150, sk=170, h=6, hk=2)
    one = narrows.attention(*arrays, causal=True, threads=1)
    for threads in (0, 2, 3, 7):
        np.testing.assert_array_equal(narrows.attention(*arrays, causal=True, threads=threads), one)


def test_the_gil_is_released():
    q, k, v = inputs(b=1, sq=3000, sk=3000, h=4, hk=4, d=64)
    done = threading.Event()
    worker = threading.Thread(target=lambda: (narrows.attention(q, k, v, threads=1), done.set()))
    ticks = 0
    worker.start()
    while not done.is_set():  # holding the GIL, the call would let this loop run once or twice only
        ticks += 1
        time.sleep(0.0005)
    worker.join()
    assert ticks > 5
