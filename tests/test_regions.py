"""Where a program captures. A line marked `# region: KIND` must be reported with that kind, any other line must not."""

from __future__ import annotations

import re
import textwrap

import pytest

from graphlint import ir, summary
from graphlint.link import Project
from graphlint.regions import KINDS, Region, anchored, find, find_all

_MARK = re.compile(r"# region: ([a-z-]+)")


class _Files:
    """A project in memory: path -> text; the module name is the path without its suffix."""

    def __init__(self, files: dict[str, str]) -> None:
        self.texts = {path: textwrap.dedent(text) for path, text in files.items()}
        self.read_paths: list[str] = []

    def read(self, path: str) -> ir.Summary:
        self.read_paths.append(path)
        return summary.read(path, _module(path), self.texts[path])

    def summary(self, name: str, near: str) -> ir.Summary | None:
        for path in self.texts:
            if _module(path) == name:
                return self.read(path)
        return None


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _regions(files: dict[str, str], declared: tuple[str, ...] = ()) -> tuple[list[Region], _Files]:
    reader = _Files(files)
    found = find_all(reader.texts.items(), reader.read, Project(reader), declared)
    return found, reader


def _check(files: dict[str, str] | str, declared: tuple[str, ...] = ()) -> list[Region]:
    files = {"main.py": files} if isinstance(files, str) else files
    found, reader = _regions(files, declared)
    wanted = [
        (path, row, mark[1])
        for path, text in reader.texts.items()
        for row, line in enumerate(text.splitlines(), 1)
        for mark in [_MARK.search(line)]
        if mark
    ]
    assert [(one.path, one.row, one.kind) for one in found] == sorted(wanted)
    assert all(one.kind in KINDS for one in found)
    return found


SPELLINGS = {
    "plain": """
        import torch
        with torch.cuda.graph(g):  # region: graph
            y = model(x)
        """,
    "alias of torch": """
        import torch as tc
        with tc.cuda.graph(g):  # region: graph
            y = model(x)
        """,
    "alias of the submodule": """
        import torch.cuda as C
        from torch import cuda
        with C.graph(g):  # region: graph
            y = model(x)
        with cuda.graph(g):  # region: graph
            y = model(x)
        """,
    "imported name": """
        from torch.cuda import graph, CUDAGraph
        g = CUDAGraph()
        with graph(g):  # region: graph
            y = model(x)
        """,
    "imported under another name": """
        from torch.cuda import graph as capture
        def run():
            with capture(g, pool=p):  # region: graph
                y = model(x)
        """,
    "getattr": """
        import torch
        capture = getattr(torch.cuda, "graph", None)
        with capture(g):  # region: graph
            y = model(x)
        """,
    "several managers": """
        import torch
        with torch.cuda.stream(s), torch.inference_mode(), torch.cuda.graph(g) as ctx:  # region: graph
            y = model(x)
        with (  # region: graph
            torch.cuda.graph(g, pool=p),
            torch.no_grad(),
        ):
            y = model(x)
        """,
    "kept in a variable": """
        import torch
        from contextlib import nullcontext
        def run(use):
            ctx = torch.cuda.graph(g) if use else nullcontext()
            with ctx:  # region: graph
                y = model(x)
        """,
    "kept in a variable by branches": """
        import torch
        from contextlib import nullcontext
        def run(use):
            if use:
                ctx = torch.cuda.graph(g)
            else:
                ctx = nullcontext()
            with ctx:  # region: graph
                y = model(x)
        """,
    "kept on self": """
        import torch
        class Runner:
            def __init__(self, g):
                self.capture = torch.cuda.graph(g)
            def run(self, x):
                with self.capture:  # region: graph
                    return self.model(x)
        """,
    "factory chosen at run time": """
        import torch, functools
        def run(pool):
            make = functools.partial(torch.cuda.graph, pool=pool) if pool else torch.cuda.graph
            with make(g):  # region: graph
                y = model(x)
        """,
    "device module": """
        import torch
        device_module = torch.get_device_module("cuda")
        with device_module.graph(g):  # region: graph
            y = model(x)
        with torch.get_device_module().graph(g):  # region: graph
            y = model(x)
        with getattr(torch, device_type).graph(g):  # region: graph
            y = model(x)
        """,
    "device module handed in": """
        def run(device_module, g):
            with device_module.graph(g):  # region: graph
                return model(x)
        """,
    "handed to another manager": """
        import torch
        with use_torch_stream(torch.cuda.graph(g)):  # region: graph
            y = model(x)
        """,
    "splat": """
        import torch
        with torch.cuda.graph(g, **options):  # region: graph
            y = model(x)
        """,
    "empty body": """
        import torch
        with torch.cuda.graph(g):  # region: graph
            pass
        """,
    "subclass": """
        import torch
        class quiet_graph(torch.cuda.graph):
            def __enter__(self):
                return super().__enter__()
        with quiet_graph(g):  # region: graph
            y = model(x)
        """,
    "generator around it": """
        import contextlib, torch
        @contextlib.contextmanager
        def capture(*args, **kwargs):
            with torch.cuda.graph(*args, **kwargs):  # region: graph
                yield
        with capture(g):  # region: graph
            y = model(x)
        """,
    "factory": """
        import torch
        def capture(g, pool=None):
            return torch.cuda.graph(g, pool=pool)
        with capture(g):  # region: graph
            y = model(x)
        """,
    "method that returns it": """
        import torch
        class Accelerator:
            def capture_to_graph(self, g):
                return torch.cuda.graph(g)
        with get_accelerator().capture_to_graph(g):  # region: graph
            y = model(x)
        """,
    "property that returns it": """
        import torch
        class Runner:
            @property
            def capture(self):
                return torch.cuda.graph(self.g)
            def run(self, x):
                with self.capture:  # region: graph
                    return self.model(x)
        """,
    "context as a decorator": """
        import contextlib, torch
        @contextlib.contextmanager
        def capture(g):
            with torch.cuda.graph(g):  # region: graph
                yield
        @capture(g)  # region: graph
        def step(x):
            return model(x)
        """,
    "class that begins and ends": """
        import torch
        class Segments:
            def __enter__(self):
                self._begin()
                return self
            def __exit__(self, *exc):
                self.graph.capture_end()
            def _begin(self):
                self.graph = torch.cuda.CUDAGraph()
                self.graph.capture_begin()  # region: manual
        with Segments() as segments:  # region: graph
            y = model(x)
        """,
    "exit stack": """
        import torch
        from contextlib import ExitStack
        with ExitStack() as stack:
            if use:
                stack.enter_context(torch.cuda.graph(g))  # region: graph
            y = model(x)
        print(y)
        """,
    "entered by hand": """
        import torch
        ctx = torch.cuda.graph(g)
        ctx.__enter__()  # region: graph
        y = model(x)
        ctx.__exit__(None, None, None)
        print(y)
        """,
    "begin and end": """
        import torch
        g = torch.cuda.CUDAGraph()
        with torch.cuda.stream(s):
            g.capture_begin(pool=p)  # region: manual
            y = model(x)
            g.capture_end()
        """,
    "runtime API": """
        from cuda.bindings import runtime
        def capture(stream):
            err = runtime.cudaStreamBeginCapture(stream, mode)[0]  # region: manual
            try:
                work()
                err, graph = runtime.cudaStreamEndCapture(stream)
            except Exception:
                clean()
        """,
    "other backends": """
        import torch, torch_npu
        import habana_frameworks.torch as ht
        with torch.npu.graph(g):  # region: other-backend
            y = model(x)
        with torch.xpu.graph(xpu_graph=g):  # region: other-backend
            y = model(x)
        with torch_npu.npu.graph(g):  # region: other-backend
            y = model(x)
        with ht.hpu.graph(g):  # region: other-backend
            y = model(x)
        with torch.musa.graph(g):  # region: other-backend
            y = model(x)
        """,
    "graph object as a manager": """
        import torch
        g = torch.accelerator.Graph()
        with s, g:  # region: other-backend
            y = model(x)
        """,
    "warp": """
        import warp as wp
        with wp.ScopedCapture(device=d) as capture:  # region: warp
            wp.launch(kernel, dim=n)
        wp.capture_begin()  # region: warp
        wp.launch(kernel, dim=n)
        graph = wp.capture_end()
        """,
    "cupy": """
        import cupy
        s = cupy.cuda.Stream(non_blocking=True)
        with s:
            s.begin_capture()  # region: cupy
            y = cupy.sin(x)
            g = s.end_capture()
        """,
    "graphed callables": """
        import torch
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch import make_graphed_callables
        f = torch.cuda.make_graphed_callables(model, (x,))  # region: graphed-callable
        a, b = torch.cuda.make_graphed_callables((f, g), ((x,), (y,)))  # region: graphed-callable
        m = te.make_graphed_callables(modules=layer, sample_args=(x,))  # region: graphed-callable
        m = make_graphed_callables(layer, (x,), fp8_enabled=True)  # region: graphed-callable
        """,
    "compile modes": """
        import torch
        from functools import partial
        f = torch.compile(model, mode="reduce-overhead")  # region: compile
        f = torch.compile(model, mode="max-autotune", dynamic=False)  # region: compile
        f = torch.compile(model, options={"triton.cudagraphs": True})  # region: compile
        f = torch.compile(model, backend="cudagraphs")  # region: compile
        f = torch.compile(mode="reduce-overhead")(model)  # region: compile
        model.compile(mode="reduce-overhead")  # region: compile
        @torch.compile(mode="reduce-overhead")  # region: compile
        def step(x):
            return x
        @partial(torch.compile, mode="reduce-overhead")  # region: compile
        def step(x):
            return x
        fast = partial(torch.compile, mode="reduce-overhead")
        f = fast(model)  # region: compile
        """,
    "compile settings": """
        import argparse, torch
        parser = argparse.ArgumentParser()
        parser.add_argument("--compile-mode", choices=["default", "reduce-overhead"])
        args = parser.parse_args()
        MODE = "reduce-overhead"
        f = torch.compile(model, mode=MODE)  # region: compile
        f = torch.compile(model, mode="max-autotune" if tune else None)  # region: compile
        f = torch.compile(model, mode=args.compile_mode)  # region: compile
        options = {"fullgraph": True}
        options["mode"] = "reduce-overhead"
        f = torch.compile(model, **options)  # region: compile
        f = torch.compile(model, **dict(backend="cudagraphs"))  # region: compile
        """,
    "compile by test parameter": """
        import pytest, torch
        @pytest.mark.parametrize("mode", [None, pytest.param("reduce-overhead", id="graphs")])
        class TestModel:
            def test_it(self, mode):
                f = torch.compile(model, mode=mode)  # region: compile
        """,
    "compile helpers": """
        from utils import compile_with_warmup
        from functools import partial
        f = compile_with_warmup(model, mode="reduce-overhead", warmup=3)  # region: compile
        fast = partial(compile_with_warmup, mode="reduce-overhead")
        f = fast(model)  # region: compile
        """,
    "compile by a field": """
        import torch
        from dataclasses import dataclass
        @dataclass
        class Config:
            mode: str = "reduce-overhead"
        def build(model, config: Config):
            return torch.compile(model, mode=config.mode)  # region: compile
        """,
    "compile switched on for all": """
        import torch
        torch._inductor.config.triton.cudagraphs = True
        f = torch.compile(model)  # region: compile
        f = torch.compile(model, mode="default")
        """,
    "known wrappers": """
        from tensordict.nn import CudaGraphModule
        from triton.testing import do_bench_cudagraph
        import graphlint
        from graphlint import capture_safe
        f = CudaGraphModule(policy, warmup=5)  # region: wrapper
        ms = do_bench_cudagraph(lambda: f(x))  # region: wrapper
        @capture_safe  # region: wrapper
        def step(x):
            return x
        @graphlint.capture_safe(buckets=(512, 1024))  # region: wrapper
        def step(x):
            return x
        """,
    "megatron manager": """
        from megatron.core.transformer.cuda_graphs import CudaGraphManager
        class Layer:
            def __init__(self, config):
                self.cudagraph_manager = CudaGraphManager(config)  # region: wrapper
        """,
    "own wrapper class": """
        import torch
        class Graphed:
            def __init__(self, fn):
                self.fn = fn
                self.graph = None
            def __call__(self, x):
                if self.graph is None:
                    self.graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(self.graph):  # region: graph
                        self.out = self._run(x)
                self.graph.replay()
                return self.out
            def _run(self, x):
                return self.fn(x)
        class Special(Graphed):
            pass
        step = Graphed(model.forward)  # region: wrapper
        model.step = Special(fn=model.step)  # region: wrapper
        if isinstance(step, Graphed):
            Graphed.clear()
        """,
    "own decorator with arguments": """
        import torch
        class static_capture:
            def __init__(self, model, use_graphs=True):
                self.enabled = use_graphs
            def __call__(self, fn):
                self.fn = fn
                def run(*args):
                    with torch.cuda.graph(g):  # region: graph
                        self.fn(*args)
                return run
        @static_capture(model)  # region: wrapper
        def step(x):
            return x
        @static_capture(model, use_graphs=False)
        def evaluate(x):
            return x
        """,
    "method named by a string": """
        import torch
        def graph_method(obj, name):
            fn = getattr(obj, name)
            with torch.cuda.graph(g):  # region: graph
                fn()
        graph_method(decoder, "step")  # region: wrapper
        """,
    "own function": """
        import torch
        def capture_graph(fn, x):
            g = torch.cuda.CUDAGraph()
            def body():
                return fn(x)
            with torch.cuda.graph(g):  # region: graph
                y = body()
            return g, y
        def helper(func, *args):
            return capture_graph(func, *args)  # region: wrapper
        helper(model, x)  # region: wrapper
        """,
    "bench helper with a flag": """
        import torch
        def bench(fn, use_cuda_graph=False):
            if use_cuda_graph:
                with torch.cuda.graph(g):  # region: graph
                    fn()
            fn()
        bench(work)
        bench(work, use_cuda_graph=True)  # region: wrapper
        bench(work, use_cuda_graph=flag)  # region: wrapper
        bench(work, use_cuda_graph=False)
        """,
}

LOOK_ALIKES = {
    "constructing a graph": """
        import torch
        g = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        """,
    "stream only": """
        import contextlib, torch
        @contextlib.contextmanager
        def graph_capture(device):
            with torch.cuda.stream(s):
                yield
        with graph_capture(device):
            y = model(x)
        """,
    "other graphs": """
        import cudnn, dgl, torch
        from networkx import graph
        with cudnn.graph(handle) as (g, _):
            y = model(x)
        g = dgl.graph((u, v))
        loss = self.loss.graph(a, b)
        with graph(1):
            pass
        """,
    "auto-import that is overwritten": """
        from torch.cuda import graph
        def main():
            graph = Graph.load("x")
            with graph.session() as session:
                session.run()
            with graph(1):
                pass
        """,
    "text only": '''
        """with torch.cuda.graph(g): model(x)"""
        # with torch.cuda.graph(g):
        NOTE = "torch.cuda.make_graphed_callables(model, (x,))"
        ''',
    "patching": """
        import torch
        from unittest.mock import patch
        torch.cuda.graph = partial(torch.xpu.graph)
        original = torch.cuda.CUDAGraph.capture_begin
        def capture_begin(self, *args):
            return original(self, *args)
        torch.cuda.CUDAGraph.capture_begin = capture_begin
        with patch.object(torch.cuda, "graph", fake):
            run()
        """,
    "override that hands on": """
        import torch
        class Graph(torch.cuda.CUDAGraph):
            def capture_begin(self, *args):
                super().capture_begin(*args)
            def capture_end(self):
                super().capture_end()
        """,
    "compile without graphs": """
        import re, torch
        f = torch.compile(model)
        f = torch.compile(model, mode="default")
        f = torch.compile(model, mode="max-autotune-no-cudagraphs")
        f = torch.compile(model, options={"triton.cudagraphs": False})
        f = torch.compile(model, backend="inductor")
        mode = None  # "reduce-overhead"
        f = torch.compile(model, mode=mode)
        f = torch.compile(model, **settings)
        p = re.compile("reduce-overhead")
        """,
    "other captures": """
        from scapy.sniff import Sniffer
        sniffer = Sniffer()
        sniffer.begin_capture()
        sniffer.end_capture()
        camera.capture_begin()
        with sound.ScopedCapture() as clip:
            play()
        """,
    "compile settings that are no call of a compiler": """
        from utils import CompileConfig, compile_with_warmup
        config = CompileConfig(mode="reduce-overhead")
        settings = compile_settings(mode="reduce-overhead")
        f = compile_with_warmup(model, mode="default")
        """,
    "refused by the wrapper": """
        import pytest
        from tensordict.nn import CudaGraphModule
        with pytest.raises(TypeError):
            CudaGraphModule(3)
        """,
    "setting elsewhere": """
        import torch
        class Engine:
            def __init__(self, model, config):
                self.model = model
                self.config = config
            def forward(self, x):
                if self.config.enable_cuda_graph:
                    with torch.cuda.graph(g):  # region: graph
                        return self.model(x)
                return self.model(x)
        engine = Engine(model, config)
        """,
    "tensor parameters are not callables": """
        import torch
        def capture(x: torch.Tensor, out):
            with torch.cuda.graph(g):  # region: graph
                out.copy_(x)
        capture(a, b)
        """,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    assert _check(SPELLINGS[name]), "the example must hold a region"


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alike(name: str) -> None:
    _check(LOOK_ALIKES[name])


def _rows(region: Region) -> list[int]:
    return [stmt.at[0] for stmt in region.body]


def test_managers_entered_after_the_capture_are_captured() -> None:
    region = _check(
        """
        import torch
        with torch.no_grad(), torch.cuda.graph(g), torch.cuda.stream(s):  # region: graph
            y = model(x)
        """
    )[0]
    (inner,) = region.body
    assert isinstance(inner, ir.With) and len(inner.items) == 1
    assert [stmt.at[0] for stmt in inner.body] == [4]
    assert region.captured == "torch.cuda.stream, model"


@pytest.mark.parametrize(
    ("text", "rows", "end_row"),
    [
        (SPELLINGS["exit stack"], [7], 7),
        (SPELLINGS["entered by hand"], [5], 5),
        (SPELLINGS["begin and end"], [6], 7),
    ],
)
def test_body_ends_where_the_capture_ends(text: str, rows: list[int], end_row: int) -> None:
    region = _check(text)[0]
    assert _rows(region) == rows
    assert region.end_row == end_row


def test_begin_and_end_over_a_try() -> None:
    region = _check(
        """
        import torch
        def run():
            g.capture_begin()  # region: manual
            try:
                y = model(x)
                g.capture_end()
                z = y.item()
            finally:
                clean()
            after()
        """
    )[0]
    (attempt,) = region.body
    assert isinstance(attempt, ir.Try)
    assert [stmt.at[0] for stmt in attempt.body] == [6] and not attempt.final


def test_end_in_finally() -> None:
    region = _check(
        """
        import torch
        def run():
            try:
                g.capture_begin()  # region: manual
                y = model(x)
            finally:
                g.capture_end()
            after()
        """
    )[0]
    assert _rows(region) == [6] and region.end_row == 8


def test_own_end_call_is_preferred() -> None:
    outer, inner = _check(
        """
        import cupy
        def run(a, b):
            a.begin_capture()  # region: cupy
            b.begin_capture()  # region: cupy
            work()
            b.end_capture()
            a.end_capture()
        """
    )
    assert (outer.row, outer.end_row) == (4, 8)
    assert (inner.row, inner.end_row) == (5, 7)


def test_what_a_call_captures() -> None:
    regions = _check(
        """
        import torch
        f = torch.cuda.make_graphed_callables(self.model, (x,))  # region: graphed-callable
        f = torch.compile(mode="reduce-overhead")(self.model)  # region: compile
        @torch.compile(mode="reduce-overhead")  # region: compile
        def step(x):
            return x
        """
    )
    assert [one.captured for one in regions] == ["self.model", "self.model", "step"]
    assert all(one.backward for one in regions)
    assert isinstance(regions[2].decorated, ir.Function) and regions[2].decorated.name == "step"
    assert regions[0].api == "torch.cuda.make_graphed_callables"


def test_certain_only_where_nothing_decides_at_run_time() -> None:
    text = """
        import torch
        from tensordict.nn import CudaGraphModule
        f = torch.compile(model, mode="reduce-overhead")  # region: compile
        f = torch.compile(model, mode="reduce-overhead" if fast else None)  # region: compile
        with torch.cuda.graph(g) if fast else nullcontext():  # region: graph
            y = model(x)
        """
    assert [one.certain for one in _check(text)] == [True, False, False]


def test_owner_is_the_function_around() -> None:
    region = _check(
        """
        import torch
        class Runner:
            def capture(self):
                with torch.cuda.graph(self.g):  # region: graph
                    self.out = self.model(self.x)
        """
    )[0]
    assert region.function == "Runner.capture" and region.owner is not None and region.owner.name == "capture"
    assert region.captured == "self.model"


def test_helpers_are_followed_across_files() -> None:
    _check(
        {
            "pkg/__init__.py": "from .inner import *\n",
            "pkg/inner.py": """
                import torch
                class StaticStep:
                    def __init__(self, fn):
                        self.fn = fn
                    def build(self):
                        with torch.cuda.graph(self.g):  # region: graph
                            self.fn()
                """,
            "pkg/steps.py": """
                from pkg.inner import StaticStep as Step
                def make(fn):
                    return Step(fn)  # region: wrapper
                """,
            "app.py": """
                from pkg import StaticStep
                from pkg.steps import make
                a = StaticStep(train)  # region: wrapper
                b = make(train)  # region: wrapper
                """,
            "other.py": """
                from elsewhere import StaticStep
                a = StaticStep(train)
                """,
        }
    )


def test_only_files_that_matter_are_read() -> None:
    files = {
        "graphs.py": """
            import torch
            def record_step(fn):
                with torch.cuda.graph(g):
                    fn()
            """,
        "user.py": "from graphs import record_step\nrecord_step(train)\n",
        "imports_only.py": "from graphs import record_step\n",
        "unrelated.py": "import torch\nx = torch.ones(3)\n",
    }
    found, reader = _regions(files)
    assert [one.path for one in found] == ["graphs.py", "user.py"]
    assert sorted(set(reader.read_paths)) == ["graphs.py", "user.py"]


def test_declared_names() -> None:
    files = {
        "main.py": """
            from vendor import fast_path, Recorder
            with fast_path(g):  # region: graph
                y = model(x)
            r = Recorder(model)  # region: wrapper
            @Recorder()  # region: wrapper
            def step(x):
                return x
            """
    }
    assert not _regions(files)[0]
    _check(files, declared=("vendor.fast_path", "vendor.Recorder"))


def test_declared_function_is_captured_itself() -> None:
    region = _check(
        {
            "model.py": """
                class Decoder:
                    def forward(self, x):  # region: wrapper
                        return x + 1
                """
        },
        declared=("model.Decoder.forward",),
    )[0]
    assert isinstance(region.decorated, ir.Function) and region.decorated.qualname == "Decoder.forward"
    assert (region.row, region.end_row) == (3, 4)


@pytest.mark.parametrize("text", SPELLINGS.values(), ids=SPELLINGS)
def test_anchored_texts(text: str) -> None:
    assert anchored(text)


def test_anchors_pass_over_other_texts() -> None:
    assert not anchored("import torch\nf = torch.compile(model, mode='max-autotune-no-cudagraphs')\n")
    assert not anchored("def build_graph(nodes):\n    return Graph(nodes)\n")
    assert anchored("from vendor import fast\n", declared=("vendor.fast",))


def test_names_bound_to_themselves_end() -> None:
    _check(
        """
        import torch
        def run(f, g):
            f = g
            g = f
            f = f or g
            with f(x):
                pass
            model = torch.compile(model, mode="reduce-overhead")  # region: compile
        """
    )


def test_order_is_stable() -> None:
    text = textwrap.dedent(SPELLINGS["compile modes"])
    once = find(summary.read("b.py", "b", text))
    again = find(summary.read("b.py", "b", text))
    assert once == again and [one.row for one in once] == sorted(one.row for one in once)


def test_long_elif_chains_and_files_end() -> None:
    branches = "\n".join(f"    elif x == {number}:\n        y = {number}" for number in range(150))
    head = "import torch\ndef run(x):\n    if x < 0:\n        y = 0\n"
    text = f"{head}{branches}\n    with torch.cuda.graph(g):\n        f(y)\n"
    assert [one.row for one in find(summary.read("a.py", "a", text))] == [305]


def test_mutual_recursion_of_helpers_ends() -> None:
    _check(
        """
        import torch
        class A:
            def __init__(self, fn):
                self.fn = fn
            def one(self):
                self.two()
            def two(self):
                self.one()
                self.fn()
            def capture(self):
                with torch.cuda.graph(g):  # region: graph
                    self.one()
        a = A(train)  # region: wrapper
        """
    )
