"""Other libraries that compute attention, timed for `narrows bench`, which runs this text in a Python interpreter.

Speaks JSON, one object a line. First it says on stdout which peers this interpreter has: {"peers": {name: version}, "missing":
{name: reason}}. Then it answers each line on stdin with its "id". {"do": "prepare", "row": {...}} makes tensors of the row's shapes and gives
{"ready": [names], "failed": {name: reason}}; a peer that does not claim to compute such a row is in neither. {"do": "time", "peer":
name, "seconds": s} runs it warm until s seconds are spent, once at least, and gives {"ms": [each call]} or {"error": reason}.
"""

import gc
import json
import os
import sys
import time

# NumPy's form has one BLAS thread in each of its own; a preset that picks kernels of another CPU is not its fault.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ.pop("OPENBLAS_CORETYPE", None)


class NotClaimed(Exception):
    """The peer has no way to compute such a row."""


def need(claimed):
    if not claimed:
        raise NotClaimed


def normal(shape, seed):
    import numpy as np

    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def alibi(row):
    """Slopes and distances as an additive bias, (1, h, sq, sk)."""
    import numpy as np

    slopes = 2.0 ** (-8 * (np.arange(row["h"]) + 1) / row["h"])
    positions = np.arange(row["sq"]) + row["sk"] - row["sq"]
    distances = np.abs(positions[:, None] - np.arange(row["sk"]))
    return (-slopes[:, None, None] * distances)[None].astype(np.float32)


def bias_of(row):
    """What a row adds to the scores, in fp32, or None."""
    import numpy as np

    if row["case"] == "bias":
        return normal((1, row["h"], row["sq"], row["sk"]), 4)
    if row["case"] == "alibi":
        return alibi(row)
    if row["case"] == "mask":
        seen = np.random.default_rng(5).random((1, 1, row["sq"], row["sk"])) < 0.75
        return np.where(seen, np.float32(0), np.float32(-np.inf))
    return None


class ThreeKernel:
    """Standard attention in NumPy: S = QK^T, P = softmax(S), O = PV, and its gradients from a P that it stored.

    The best that we know how to write with NumPy's wheel: heads spread over threads, each with one BLAS thread and scores
    that it reuses; scale folded into Q; softmax in place; its division left to O.
    """

    MOST_BYTES = 4 << 30  # of scores

    @staticmethod
    def version():
        import numpy

        return f"NumPy {numpy.__version__}"

    def __init__(self, row):
        from concurrent.futures import ThreadPoolExecutor

        import numpy as np

        b, h, hk, sq, sk, backward = *(row[name] for name in ("b", "h", "hk", "sq", "sk")), row["op"] == "backward"
        need(row["dtype"] == "fp32" and row["case"] in ("", "bias", "mask", "alibi", "gqa4"))
        need((b * h * backward + 2 * row["threads"]) * sq * sk * 4 <= self.MOST_BYTES)
        self.np, self.threads, self.backward = np, row["threads"], backward
        self.q, self.k = normal((b, h, sq, row["d"]), 1), normal((b, hk, sk, row["d"]), 2)
        self.v, self.dout = normal((b, hk, sk, row["dv"]), 3), normal((b, h, sq, row["dv"]), 6)
        self.o = np.zeros((b, h, sq, row["dv"]), np.float32)
        self.grads = [np.zeros_like(tensor) for tensor in (self.q, self.k, self.v)]
        self.group, self.scale = h // hk, np.float32(row["d"] ** -0.5)
        self.bias = bias_of(row)
        self.hidden = np.triu(np.ones((sq, sk), bool), sk - sq + 1) if row["causal"] else None
        self.scores = [np.zeros((1 + backward, sq, sk), np.float32) for _ in range(self.threads)]
        # A thread has whole groups of heads, so that no two add to one dK.
        self.work = [(n, kv) for n in range(b) for kv in range(hk)]
        self.pool = ThreadPoolExecutor(self.threads)
        if backward:
            self.p = np.zeros((b, h, sq, sk), np.float32)
            for n, kv, head in self.heads(0, 1):
                self.p[n, head] /= self.probabilities(n, kv, head, self.p[n, head])

    def heads(self, first, step):
        for n, kv in self.work[first::step]:
            for head in range(kv * self.group, (kv + 1) * self.group):
                yield n, kv, head

    def run(self):
        list(self.pool.map(self.share, range(self.threads)))

    def result(self):
        return self.grads if self.backward else self.o

    def share(self, thread):
        for n, kv, head in self.heads(thread, self.threads):
            if self.backward:
                self.gradients(n, kv, head, *self.scores[thread])
            else:
                self.attend(n, kv, head, *self.scores[thread])

    def probabilities(self, n, kv, head, s):
        """exp(S - max) into s; gives the sums of its rows."""
        np = self.np
        np.matmul(self.q[n, head] * self.scale, self.k[n, kv].T, out=s)
        if self.bias is not None:
            s += self.bias[0, head % self.bias.shape[1]]
        if self.hidden is not None:
            np.copyto(s, -np.inf, where=self.hidden)
        s -= s.max(axis=1, keepdims=True)
        np.exp(s, out=s)
        return s.sum(axis=1, keepdims=True)

    def attend(self, n, kv, head, s):
        sums = self.probabilities(n, kv, head, s)
        self.np.matmul(s, self.v[n, kv], out=self.o[n, head])
        self.o[n, head] /= sums

    def gradients(self, n, kv, head, dp, ds):
        np, p, (dq, dk, dv) = self.np, self.p[n, head], self.grads
        np.matmul(self.dout[n, head], self.v[n, kv].T, out=dp)
        np.multiply(p, dp, out=ds)
        dp -= ds.sum(axis=1, keepdims=True)
        np.multiply(p, dp, out=ds)
        np.matmul(ds, self.k[n, kv], out=dq[n, head])
        dq[n, head] *= self.scale
        for gradient, term in (dk, ds.T @ (self.q[n, head] * self.scale)), (dv, p.T @ self.dout[n, head]):
            if head % self.group == 0:
                gradient[n, kv] = term
            else:
                gradient[n, kv] += term


class OnnxRuntime:
    """Its contributed operators: GroupQueryAttention where causal or decoding, MultiHeadAttention otherwise."""

    @staticmethod
    def version():
        import onnx  # noqa: F401  (models are made with it)
        import onnxruntime

        return onnxruntime.__version__

    def __init__(self, row):
        import numpy as np
        import onnxruntime

        need(row["dtype"] in ("fp32", "fp16") and row["op"] != "backward" and row["dv"] == row["d"])
        need(row["case"] in ("", "bias", "mask", "alibi", "softcap", "window512", "gqa4"))
        self.type = np.float32 if row["dtype"] == "fp32" else np.float16
        bias, grouped = bias_of(row), row["causal"] or row["op"] == "decode"
        if grouped:
            need(bias is None and (row["sq"] == 1 if row["op"] == "decode" else row["sq"] == row["sk"]))
            model, feeds, results = self.grouped(row)
        else:
            need(row["h"] == row["hk"] and row["case"] in ("", "bias", "mask", "alibi"))
            model, feeds, results = self.plain(row, bias)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = row["threads"]
        options.log_severity_level = 4
        # Threads that wait for the next call would take cores from whoever is timed next.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        value = onnxruntime.OrtValue.ortvalue_from_numpy
        self.values = {name: value(array) for name, array in feeds.items()}
        for name, bound in self.values.items():
            self.binding.bind_ortvalue_input(name, bound)
        for name, shape in results.items():
            # Past and present keys share memory, as in a server: a step writes one row.
            shared = self.values.get(name.replace("present", "past"))
            self.values[name] = shared if shared is not None else value(np.zeros(shape, self.type))
            self.binding.bind_ortvalue_output(name, self.values[name])

    def run(self):
        self.session.run_with_iobinding(self.binding)

    def result(self):
        return self.values["o"].numpy()

    def packed(self, row):
        q = normal((row["b"], row["sq"], row["h"] * row["d"]), 1)
        k, v = (normal((row["b"], row["sk"], row["hk"] * row["d"]), seed) for seed in (2, 3))
        return {name: array.astype(self.type) for name, array in zip("qkv", (q, k, v))}

    def model(self, name, inputs, outputs, feeds, results, attributes):
        import numpy as np
        from onnx import TensorProto, helper

        types = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float16): TensorProto.FLOAT16, np.dtype(np.int32): TensorProto.INT32}
        floats = types[np.dtype(self.type)]
        node = helper.make_node(name, inputs, outputs, domain="com.microsoft", **attributes)
        graph = helper.make_graph(
            [node],
            "attention",
            [helper.make_tensor_value_info(key, types[array.dtype], array.shape) for key, array in feeds.items()],
            [helper.make_tensor_value_info(key, floats, shape) for key, shape in results.items()],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()

    def plain(self, row, bias):
        feeds, inputs = self.packed(row), ["q", "k", "v"]
        if bias is not None:
            feeds["bias"] = bias.astype(self.type)
            inputs += ["", "", "bias"]
        results = {"o": feeds["q"].shape}
        return self.model("MultiHeadAttention", inputs, ["o"], feeds, results, {"num_heads": row["h"]}), feeds, results

    def grouped(self, row):
        import numpy as np

        feeds, decode, cache = self.packed(row), row["op"] == "decode", (row["b"], row["hk"], row["sk"], row["d"])
        if decode:
            feeds["past_k"], feeds["past_v"] = (normal(cache, seed).astype(self.type) for seed in (2, 3))
            # The newest key and value of each sequence arrive with its query.
            feeds["k"], feeds["v"] = (np.ascontiguousarray(feeds[name][:, : row["sq"]]) for name in "kv")
        feeds["last"] = np.full(row["b"], row["sk"] - 1, np.int32)
        feeds["total"] = np.array([row["sk"]], np.int32)
        inputs = ["q", "k", "v", *(("past_k", "past_v") if decode else ("", "")), "last", "total"]
        results = {"o": feeds["q"].shape, "present_k": cache, "present_v": cache}
        attributes = {"num_heads": row["h"], "kv_num_heads": row["hk"]}
        if row["case"] == "softcap":
            attributes["softcap"] = 30.0
        if row["case"] == "window512":
            attributes["local_window_size"] = 512
        return self.model("GroupQueryAttention", inputs, list(results), feeds, results, attributes), feeds, results


class Torch:
    """torch.nn.functional.scaled_dot_product_attention and its autograd."""

    @staticmethod
    def version():
        import torch

        return torch.__version__

    def __init__(self, row):
        import torch

        need(row["case"] in ("", "bias", "mask", "alibi", "dropout", "gqa4"))
        need(not row["causal"] or row["sq"] == row["sk"])
        torch.set_num_threads(row["threads"])
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[row["dtype"]]

        def tensor(array):
            return torch.from_numpy(array).to(dtype)

        def heads_second(seed, rows, heads, width):
            return tensor(normal((row["b"], rows, heads, width), seed)).transpose(1, 2)

        q = heads_second(1, row["sq"], row["h"], row["d"])
        k, v = heads_second(2, row["sk"], row["hk"], row["d"]), heads_second(3, row["sk"], row["hk"], row["dv"])
        bias = bias_of(row)
        if bias is not None:
            bias = torch.from_numpy(bias) == 0 if row["case"] == "mask" else tensor(bias)
        options = {"attn_mask": bias, "is_causal": row["causal"], "dropout_p": 0.1 if row["case"] == "dropout" else 0.0}
        if row["h"] != row["hk"]:
            k, v = self.share_heads(options, q, k, v)
        self.torch, self.arguments, self.options = torch, [q, k, v], options
        self.dout = None
        if row["op"] == "backward":
            for input_ in self.arguments:
                input_.requires_grad_(True)
            self.o = self.attend()
            self.dout = tensor(normal(tuple(self.o.shape), 6))

    def share_heads(self, options, q, k, v):
        """enable_gqa where this version has it, else kv heads repeated ahead."""
        import torch

        try:
            torch.nn.functional.scaled_dot_product_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], enable_gqa=True)
            options["enable_gqa"] = True
            return k, v
        except TypeError:
            group = q.shape[1] // k.shape[1]
            return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def attend(self):
        return self.torch.nn.functional.scaled_dot_product_attention(*self.arguments, **self.options)

    def run(self):
        if self.dout is not None:
            self.last = self.torch.autograd.grad(self.o, self.arguments, self.dout, retain_graph=True)
            return
        with self.torch.inference_mode():
            self.last = self.attend()

    def result(self):
        """(b, h, sq, dv), or the gradients of q, k and v."""
        return self.last


PEERS = {"onnxruntime": OnnxRuntime, "torch": Torch, "three_kernel": ThreeKernel}


def reason(error):
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]


class Server:
    REST = 0.005  # s: threads of a peer that wait a little for more work, as OpenMP's, are asleep after it
    WARM = 0.02  # s: beyond it a call is its own warming up

    def __init__(self):
        self.ready, self.last = {}, {}
        self.versions, self.missing = {}, {}
        for name, peer in PEERS.items():
            try:
                self.versions[name] = peer.version()
            except Exception as error:  # also what breaks while a package loads
                self.missing[name] = reason(error)

    def hello(self):
        return {"peers": self.versions, "missing": self.missing}

    def prepare(self, row):
        self.ready, self.last, failed = {}, {}, {}
        gc.collect()
        for name in self.versions:
            try:
                self.ready[name] = PEERS[name](row)
            except NotClaimed:
                pass
            except Exception as error:
                failed[name] = reason(error)
        return {"ready": list(self.ready), "failed": failed}

    def time(self, name, seconds):
        try:
            if self.last.get(name, 0) < self.WARM:
                self.once(name)
            spent = []
            while not spent or sum(spent) < seconds:
                spent.append(self.once(name))
            return {"ms": [each * 1e3 for each in spent]}
        except Exception as error:
            return {"error": reason(error)}
        finally:
            time.sleep(self.REST)

    def once(self, name):
        start = time.perf_counter()
        self.ready[name].run()
        self.last[name] = time.perf_counter() - start
        return self.last[name]

    def answer(self, request):
        if request["do"] == "prepare":
            answer = self.prepare(request["row"])
        else:
            answer = self.time(request["peer"], request["seconds"])
        return {"id": request["id"], **answer}


def main():
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    server = Server()
    print(json.dumps(server.hello()), file=answers)
    for line in sys.stdin:
        print(json.dumps(server.answer(json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
