"""Ways in which Python code hides a call: the linter follows each, and stays silent where the call is harmless.

Every idiom defines `step(x)`, which reaches `work(x)` by its own road. Once `work` selects by a mask, which a capture
forbids, and once it clamps, which is fine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from graphlint import config, pipeline

FAULT = "return x[x > 0]  # the fault"
HARMLESS = "return x.clamp(min=0)"
PROGRAM = """import abc, collections, contextlib, contextvars, dataclasses, enum, functools, itertools, operator, types, typing
import torch
from torch import nn


def work(x):
    {body}


{idiom}


def main():
    x = torch.randn(8, device="cuda")
    step(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(x)
    graph.replay()


if __name__ == "__main__":
    main()
"""
IDIOMS = {
    "partial": "step = functools.partial(work)",
    "reduce": "def step(x):\n    return functools.reduce(lambda h, f: f(h), [torch.abs, work], x)",
    "operator_call": "OPS = {'a': operator.methodcaller('run')}\nclass Op:\n    def __init__(self, x):\n        self.x = x\n"
    "    def run(self):\n        return work(self.x)\ndef step(x):\n    return OPS['a'](Op(x))",
    "itemgetter": "def step(x):\n    return operator.itemgetter(1)((abs, work))(x)",
    "starmap": "def step(x):\n    return list(itertools.starmap(lambda a, b: work(a) + b, [(x, 1)]))",
    "zip_longest": "def step(x):\n    for f, more in itertools.zip_longest([work], []):\n        x = f(x) if more is None else x\n"
    "    return x",
    "chain": "def step(x):\n    for f in itertools.chain([torch.abs], [work]):\n        x = f(x)\n    return x",
    "filter": "def step(x):\n    return [f(x) for f in filter(callable, [work])]",
    "max_by_key": "def step(x):\n    return max([work], key=lambda f: f.__name__)(x)",
    "singledispatch": "@functools.singledispatch\ndef show(v):\n    return v\n@show.register\ndef _(v: torch.Tensor):\n"
    "    return work(v)\ndef step(x):\n    return show(x)",
    "descriptor": "class Lazy:\n    def __init__(self, f):\n        self.f = f\n    def __get__(self, obj, owner=None):\n"
    "        return self.f(obj)\nclass Batch:\n    def __init__(self, x):\n        self.x = x\n    @Lazy\n    def kept(self):\n"
    "        return work(self.x)\ndef step(x):\n    return Batch(x).kept",
    "init_subclass": "class Op:\n    table = {}\n    def __init_subclass__(cls, key=None, **kw):\n        super().__init_subclass__(**kw)\n"
    "        Op.table[key] = cls\nclass Drop(Op, key='drop'):\n    def __call__(self, x):\n        return work(x)\n"
    "def step(x):\n    return Op.table['drop']()(x)",
    "class_decorator": "def patched(cls):\n    plain = cls.run\n    def run(self, x):\n        return work(plain(self, x))\n"
    "    cls.run = run\n    return cls\n@patched\nclass Op:\n    def run(self, x):\n        return x\ndef step(x):\n    return Op().run(x)",
    "registry": "KINDS = {}\ndef register(name):\n    def wrap(cls):\n        KINDS[name] = cls\n        return cls\n    return wrap\n"
    "@register('op')\nclass Op(nn.Module):\n    def forward(self, x):\n        return work(x)\ndef step(x):\n    return KINDS['op']()(x)",
    "method_type": "lin = nn.Linear(8, 8).cuda()\nlin.forward = types.MethodType(lambda self, x: work(x), lin)\ndef step(x):\n"
    "    return lin(x)",
    "getattr_by_name": "class Op:\n    def run_fast(self, x):\n        return work(x)\n    def __call__(self, x, mode='fast'):\n"
    "        return getattr(self, f'run_{mode}')(x)\ndef step(x):\n    return Op()(x)",
    "delegated": "class Inner:\n    def run(self, x):\n        return work(x)\nclass Outer:\n    def __init__(self, inner):\n"
    "        self._inner = inner\n    def __getattr__(self, name):\n        return getattr(self._inner, name)\n"
    "def step(x):\n    return Outer(Inner()).run(x)",
    "operator_method": "class Stage:\n    def __init__(self, f):\n        self.f = f\n    def __rshift__(self, other):\n"
    "        return Stage(lambda x: other.f(self.f(x)))\nline = Stage(torch.abs) >> Stage(work)\ndef step(x):\n    return line.f(x)",
    "named_tuple": "Plan = collections.namedtuple('Plan', 'name fn')\ndef step(x):\n    return Plan('a', torch.abs)._replace(fn=work).fn(x)",
    "typed_tuple": "class State(typing.NamedTuple):\n    x: torch.Tensor\n    fn: object = None\ndef step(x):\n"
    "    s = State(x)._replace(fn=work)\n    return s.fn(s.x)",
    "dataclass_field": "@dataclasses.dataclass\nclass Plan:\n    fns: list = dataclasses.field(default_factory=lambda: [work])\n"
    "def step(x):\n    return [f(x) for f in dataclasses.replace(Plan()).fns]",
    "context_manager": "@contextlib.contextmanager\ndef section(x):\n    try:\n        yield x\n    finally:\n        work(x)\n"
    "def step(x):\n    with section(x) as y:\n        return y * 2",
    "generator": "def parts(x):\n    for p in x.split(4):\n        yield work(p)\ndef step(x):\n    return torch.cat(list(parts(x)))",
    "yield_from": "def leaves(tree):\n    if isinstance(tree, dict):\n        for v in tree.values():\n            yield from leaves(v)\n"
    "    else:\n        yield work(tree)\ndef step(x):\n    return list(leaves({'a': {'b': x}}))",
    "context_variable": "HOOK = contextvars.ContextVar('hook', default=work)\ndef step(x):\n    return work(x) if HOOK.get() else x",
    "mixin": "class Extra:\n    def forward(self, x):\n        return work(super().forward(x))\nclass Op(Extra, nn.Linear):\n    pass\n"
    "op = Op(8, 8).cuda()\ndef step(x):\n    return op(x)",
    "sequential_subclass": "class Op(nn.Module):\n    def forward(self, x):\n        return work(x)\n"
    "class Net(nn.Sequential):\n    def __init__(self):\n        super().__init__(nn.Linear(8, 8), Op())\n"
    "net = Net().cuda()\ndef step(x):\n    return net(x)",
    "layer_subclass": "class Wide(nn.Linear):\n    def __init__(self, n):\n        super().__init__(n, 2 * n)\n"
    "wide = Wide(8).cuda()\ndef step(x):\n    return work(wide(x))",
    "layer_base_chain": "class A(nn.LayerNorm):\n    pass\nclass B(A):\n    def forward(self, x):\n"
    "        return work(A.forward(self, x))\nnorm = B(8).cuda()\ndef step(x):\n    return norm(x)",
    "hook": "lin = nn.Linear(8, 8).cuda()\nlin.register_forward_hook(lambda m, i, o: work(o))\ndef step(x):\n    return lin(x)",
    "enum_choice": "class Mode(enum.Enum):\n    KEEP = 1\n    DROP = 2\ndef step(x, mode=Mode.DROP):\n"
    "    return work(x) if mode is Mode.DROP else x",
    "sequential_spread": "class Op(nn.Module):\n    def forward(self, x):\n        return work(x)\n"
    "net = nn.Sequential(*(Op() for _ in range(2)))\ndef step(x):\n    return net(x)",
    "metaclass": "class Known(type):\n    table = {}\n    def __new__(mcs, name, bases, body):\n"
    "        cls = super().__new__(mcs, name, bases, body)\n"
    "        mcs.table[body.get('key', name)] = cls\n        return cls\nclass Base(metaclass=Known):\n"
    "    key = 'base'\nclass Drop(Base):\n    key = 'drop'\n    def __call__(self, x):\n"
    "        return work(x)\ndef step(x):\n    return Known.table['drop']()(x)",
    "metaclass_init": "class Known(type):\n    table = []\n    def __init__(cls, name, bases, body):\n"
    "        super().__init__(name, bases, body)\n        Known.table.append(cls)\n"
    "class Drop(metaclass=Known):\n    def __call__(self, x):\n        return work(x)\ndef step(x):\n"
    "    return Known.table[0]()(x)",
    "converted_children": "class Op(nn.Module):\n    def forward(self, x):\n        return work(x)\n"
    "net = nn.Sequential(nn.Identity(), nn.ReLU())\nfor name, child in net.named_children():\n"
    "    if isinstance(child, nn.ReLU):\n        setattr(net, name, Op())\ndef step(x):\n"
    "    return net(x)",
    "named_sequential": "class Op(nn.Module):\n    def forward(self, x):\n        return work(x)\n"
    "net = nn.Sequential(collections.OrderedDict([('a', nn.Identity()), ('b', Op())]))\ndef step(x):\n"
    "    return net(x)",
    "added_module": "class Op(nn.Module):\n    def forward(self, x):\n        return work(x)\n"
    "net = nn.Sequential(nn.Identity())\nnet.add_module('last', Op())\ndef step(x):\n    return net(x)",
    "submodule_by_name": "class Op(nn.Module):\n    def forward(self, x):\n        return work(x)\nclass Net(nn.Module):\n"
    "    def __init__(self):\n        super().__init__()\n"
    "        self.body = nn.Sequential(nn.Identity(), Op())\nnet = Net()\ndef step(x):\n"
    "    return net.get_submodule('body.1')(x)",
    "module_dict": "class Op(nn.Module):\n    def forward(self, x):\n        return work(x)\n"
    "ops = nn.ModuleDict({'keep': nn.Identity(), 'drop': Op()})\ndef step(x):\n"
    "    for name in ('keep', 'drop'):\n        x = ops[name](x)\n    return x",
    "module_dict_items": "class Op(nn.Module):\n    def forward(self, x):\n        return work(x)\n"
    "ops = nn.ModuleDict({'drop': Op()})\ndef step(x):\n    for name, op in ops.items():\n"
    "        x = op(x)\n    return x",
    "namespace": "ops = types.SimpleNamespace(keep=abs, drop=work)\ndef step(x):\n    return ops.drop(x)",
    "pipeline_text": "STAGES = {'abs': torch.abs, 'drop': work}\ndef step(x):\n"
    "    for name in 'abs, drop'.split(', '):\n        x = STAGES[name](x)\n    return x",
    "post_init": "@dataclasses.dataclass\nclass Op:\n    name: str = 'drop'\n    def __post_init__(self):\n"
    "        self.fn = {'drop': work}[self.name]\ndef step(x):\n    return Op().fn(x)",
    "decorator_class": "class Timed:\n    def __init__(self, fn):\n        functools.update_wrapper(self, fn)\n"
    "        self.fn = fn\n    def __call__(self, *args, **kw):\n        return self.fn(*args, **kw)\n"
    "@Timed\ndef step(x):\n    return work(x)",
    "decorator_arguments": "def retry(n):\n    def wrap(fn):\n        @functools.wraps(fn)\n        def inner(*args, **kw):\n"
    "            return fn(*args, **kw)\n        return inner\n    return wrap\n@retry(3)\ndef step(x):\n"
    "    return work(x)",
    "map_call": "def step(x):\n    return list(map(work, [x]))[0]",
    "coroutine": "import asyncio\nasync def inner(x):\n    return work(x)\nasync def outer(x):\n"
    "    return await inner(x)\ndef step(x):\n    return asyncio.run(outer(x))",
    "type_of_self": "class Op:\n    @classmethod\n    def apply(cls, x):\n        return work(x)\n"
    "    def __call__(self, x):\n        return type(self).apply(x)\ndef step(x):\n    return Op()(x)",
    "globals_lookup": "def step(x):\n    return globals()['work'](x)",
    "default_dict": "ops = collections.defaultdict(lambda: work)\ndef step(x):\n    return ops['anything'](x)",
    "chain_map": "ops = collections.ChainMap({'a': abs}, {'drop': work})\ndef step(x):\n    return ops['drop'](x)",
    "cached_property": "class Op:\n    @functools.cached_property\n    def fn(self):\n        return work\ndef step(x):\n"
    "    return Op().fn(x)",
    "singleton": "class Hub:\n    _one = None\n    def __new__(cls):\n        if cls._one is None:\n"
    "            cls._one = super().__new__(cls)\n        return cls._one\n    def run(self, x):\n"
    "        return work(x)\ndef step(x):\n    return Hub().run(x)",
    "checkpoint": "from torch.utils.checkpoint import checkpoint\ndef step(x):\n"
    "    return checkpoint(work, x, use_reentrant=False)",
    "functional_call": "class Op(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.w = nn.Parameter(torch.ones(8))\n    def forward(self, x):\n        return work(x)\n"
    "op = Op().cuda()\ndef step(x):\n"
    "    return torch.func.functional_call(op, dict(op.named_parameters()), (x,))",
    "queue": "import queue\ndef step(x):\n    q = queue.Queue()\n    q.put(work)\n    return q.get()(x)",
    "exit_stack_callback": "def step(x):\n    out = []\n    with contextlib.ExitStack() as stack:\n"
    "        stack.callback(lambda: out.append(work(x)))\n    return out[0]",
    "diamond": "class A:\n    def run(self, x):\n        return work(x)\nclass B(A):\n    def run(self, x):\n"
    "        return super().run(x)\nclass C(A):\n    def run(self, x):\n        return super().run(x)\n"
    "class D(B, C):\n    pass\ndef step(x):\n    return D().run(x)",
    "iterator_class": "class Steps:\n    def __init__(self, fns):\n        self.fns = fns\n    def __iter__(self):\n"
    "        return iter(self.fns)\ndef step(x):\n    for f in Steps([work]):\n        x = f(x)\n"
    "    return x",
    "next_class": "class Steps:\n    def __init__(self, fns):\n        self.fns, self.i = fns, 0\n"
    "    def __iter__(self):\n        return self\n    def __next__(self):\n"
    "        if self.i >= len(self.fns):\n            raise StopIteration\n        self.i += 1\n"
    "        return self.fns[self.i - 1]\ndef step(x):\n    for f in Steps([work]):\n        x = f(x)\n"
    "    return x",
    "class_get_item": "class Typed:\n    def __class_getitem__(cls, key):\n        return {'drop': work}[key]\n"
    "def step(x):\n    return Typed['drop'](x)",
    "sorted_ops": "OPS = [(1, torch.abs), (0, work)]\ndef step(x):\n"
    "    for _, f in sorted(OPS, key=lambda p: p[0]):\n        x = f(x)\n    return x",
    "set_attr_hook": "class Bag:\n    def __init__(self):\n        object.__setattr__(self, 'items', {})\n"
    "    def __setattr__(self, name, value):\n        self.items[name] = value\n"
    "    def __getattr__(self, name):\n        return self.items[name]\nbag = Bag()\nbag.drop = work\n"
    "def step(x):\n    return bag.drop(x)",
    "attr_getter": "class Op:\n    def __init__(self):\n        self.fn = work\nget = operator.attrgetter('fn')\n"
    "def step(x):\n    return get(Op())(x)",
    "dict_comprehension": "OPS = {n: f for n, f in [('drop', work)]}\ndef step(x):\n    return OPS['drop'](x)",
    "dict_union": "OPS = {'a': abs} | {'drop': work}\ndef step(x):\n    return OPS['drop'](x)",
    "merged_dicts": "BASE = {'a': abs}\nOPS = {**BASE, 'drop': work}\ndef step(x):\n    return OPS['drop'](x)",
    "lambda_default": "fns = [lambda x, f=f: f(x) for f in (torch.abs, work)]\ndef step(x):\n    return fns[1](x)",
    "property_callable": "class Op:\n    @property\n    def run(self):\n        return work\ndef step(x):\n"
    "    return Op().run(x)",
    "accumulate": "def step(x):\n    return list(itertools.accumulate([x, work], lambda a, f: f(a)))[-1]",
    "pre_hook": "lin = nn.Identity()\nlin.register_forward_pre_hook(lambda m, i: (work(i[0]),))\ndef step(x):\n"
    "    return lin(x)",
    "apply_init": "class Op(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.fn = torch.abs\n    def forward(self, x):\n        return self.fn(x)\n"
    "net = nn.Sequential(Op())\nnet.apply(lambda m: setattr(m, 'fn', work))\ndef step(x):\n"
    "    return net(x)",
    "module_list_reversed": "class Op(nn.Module):\n    def forward(self, x):\n        return work(x)\n"
    "ops = nn.ModuleList([Op(), nn.Identity()])\ndef step(x):\n    for op in reversed(ops):\n"
    "        x = op(x)\n    return x",
    "module_list_slice": "class Op(nn.Module):\n    def forward(self, x):\n        return work(x)\n"
    "ops = nn.ModuleList([nn.Identity(), Op()])\ndef step(x):\n    for op in ops[1:]:\n"
    "        x = op(x)\n    return x",
    "enumerate_modules": "class Op(nn.Module):\n    def forward(self, x):\n        return work(x)\n"
    "ops = nn.ModuleList([nn.Identity(), Op()])\ndef step(x):\n    for i, op in enumerate(ops):\n"
    "        x = op(x) if i else x\n    return x",
    "format_name": "class Op:\n    def on_drop(self, x):\n        return work(x)\ndef step(x, event='drop'):\n"
    "    return getattr(Op(), 'on_{}'.format(event))(x)",
    "percent_name": "class Op:\n    def on_drop(self, x):\n        return work(x)\ndef step(x, event='drop'):\n"
    "    return getattr(Op(), 'on_%s' % event)(x)",
    "context_result": "class Use:\n    def __enter__(self):\n        return work\n    def __exit__(self, *e):\n"
    "        pass\ndef step(x):\n    with Use() as f:\n        return f(x)",
    "vmap": "def step(x):\n    return work(torch.vmap(torch.sin)(x))",
    "autograd_function": "class Fn(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
    "        return work(x)\n    @staticmethod\n    def backward(ctx, g):\n        return g\n"
    "def step(x):\n    return Fn.apply(x)",
    "event_bus": "class Bus:\n    def __init__(self):\n        self.handlers = collections.defaultdict(list)\n"
    "    def on(self, name, fn):\n        self.handlers[name].append(fn)\n"
    "    def emit(self, name, x):\n        for fn in self.handlers[name]:\n            x = fn(x)\n"
    "        return x\nbus = Bus()\nbus.on('step', work)\ndef step(x):\n    return bus.emit('step', x)",
    "decorated_bus": "class Bus:\n    def __init__(self):\n        self.fns = {}\n    def on(self, name):\n"
    "        def deco(fn):\n            self.fns[name] = fn\n            return fn\n"
    "        return deco\nbus = Bus()\n@bus.on('drop')\ndef handler(x):\n    return work(x)\n"
    "def step(x):\n    return bus.fns['drop'](x)",
    "setdefault": "ops = {}\ndef step(x):\n    return ops.setdefault('drop', work)(x)",
}


def findings(folder: Path, body: str, idiom: str) -> list[tuple[str, str]]:
    """(rule, source line) of each finding, notes aside."""
    text = PROGRAM.format(body=body, idiom=idiom)
    file = folder / "program.py"
    file.write_text(text, encoding="utf-8")
    result = pipeline.lint([str(file)], config.Config(root=str(folder), cache=False))
    assert not result.problems
    lines = text.splitlines()
    return [(one.name, lines[one.at.row - 1].strip()) for one in result.findings if one.severity != "note"]


@pytest.mark.parametrize("idiom", IDIOMS.values(), ids=IDIOMS)
def test_the_fault_behind_an_idiom_is_found(idiom: str, tmp_path: Path) -> None:
    assert findings(tmp_path, FAULT, idiom) == [("dynamic-shape", FAULT)]


@pytest.mark.parametrize("idiom", IDIOMS.values(), ids=IDIOMS)
def test_an_idiom_alone_is_no_fault(idiom: str, tmp_path: Path) -> None:
    assert findings(tmp_path, HARMLESS, idiom) == []


def test_a_side_that_an_unknown_flag_guards_is_judged_whatever_the_flag_is_called(tmp_path: Path) -> None:
    text = (
        "import torch\n\n\ndef capture(buffer, x: torch.Tensor):\n    graph = torch.cuda.CUDAGraph()\n"
        "    with torch.cuda.graph(graph):\n        if buffer.{flag}:\n            buffer.count = int(x.sum().item())\n"
        "        y = x * 2\n    return graph, y\n"
    )
    file = tmp_path / "program.py"
    found = []
    for flag in ("eager", "counting"):
        file.write_text(text.replace("{flag}", flag), encoding="utf-8")
        result = pipeline.lint([str(file)], config.Config(root=str(tmp_path), cache=False))
        found.append({one.name for one in result.findings})
    assert found == [{"host-sync"}, {"host-sync"}]


def test_a_subclass_of_a_layer_keeps_what_its_base_was_made_with(tmp_path: Path) -> None:
    idiom = (
        "class Norm(nn.BatchNorm1d):\n    def __init__(self, n, **kw):\n        super().__init__(n, {how}, **kw)\n"
        "norm = Norm(8).cuda()\ndef step(x):\n    return norm(x[None].expand(4, 8))"
    )
    found = findings(tmp_path, HARMLESS, idiom.replace("{how}", "momentum=None"))
    assert [name for name, _ in found] == ["hidden-check"]
    assert findings(tmp_path, HARMLESS, idiom.replace("{how}", "momentum=0.1")) == []


def test_a_graph_that_may_be_one_of_two_is_captured_once(tmp_path: Path) -> None:
    text = (
        'import torch\n\nKEEPS = torch.__version__ > "2.8"\n\n\ndef begin(graph):\n    graph.capture_begin()\n\n\n'
        "def capture(fn):\n    graph = torch.cuda.CUDAGraph(keep_graph=True) if KEEPS else torch.cuda.CUDAGraph()\n"
        "    with torch.cuda.stream(torch.cuda.Stream()):\n        begin(graph)\n        {again}\n        out = fn()\n"
        '        graph.capture_end()\n    return graph, out\n\n\nx = torch.zeros(4, device="cuda")\n'
        "capture(lambda: x + 1)[0].replay()\n"
    )
    file = tmp_path / "program.py"
    found = []
    for again in ("pass", "torch.cuda.CUDAGraph().capture_begin()"):
        file.write_text(text.replace("{again}", again), encoding="utf-8")
        result = pipeline.lint([str(file)], config.Config(root=str(tmp_path), cache=False))
        found.append({one.name for one in result.findings if one.severity == "crash"})
    assert found == [set(), {"nested-capture"}]
